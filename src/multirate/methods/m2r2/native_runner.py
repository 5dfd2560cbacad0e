"""The accelerated residual stream on the native kernel: embedding, carry, both streams' shallow
layers and the block in one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor, nn

from multirate.methods._shared.config import DraftWeights
from multirate.methods._shared.draft_head import DraftHead
from multirate.methods._shared.draft_runner import NativeDraftRunner
from multirate.methods._shared.packed_taps import PackedTaps
from multirate.methods.m2r2.modules import AcceleratedStream, GateBlock
from multirate.methods.m2r2.runner import StreamRunner
from multirate.runtime.native import NativeDecoder, abi, library
from multirate.runtime.native.adapters import AdapterPack
from multirate.runtime.native.formats import draft_format, mixing_format
from multirate.runtime.native.own_layer import OwnLayer, tiles
from multirate.runtime.native.packing import Owner


class NativeStreamRunner(NativeDraftRunner, StreamRunner):
    """Same contract as StreamRunner, with packed copies of the stream's weights. Residuals are
    fp32.

    weights: how weights that only draft are packed (M2R2DecodeConfig).
    """

    decoder: NativeDecoder

    @staticmethod
    def supports(decoder: NativeDecoder, stream: AcceleratedStream) -> bool:
        """Whether the kernel can tile the block's shape; its heads must have the base's width (one
        cache layout).
        """
        c = stream.config
        sizes = c.block_heads, c.block_kv_heads, c.block_head_dim, c.block_intermediate
        return decoder.supports_fused and (not c.block or tiles(decoder, *sizes))

    def __init__(
        self,
        decoder: NativeDecoder,
        stream: AcceleratedStream,
        gate: int,
        weights: DraftWeights = "int8",
    ) -> None:
        super().__init__(decoder, stream, gate)
        self._library = library.kernel()
        self._owner = owner = Owner(draft_format(weights))
        self._mixing = mixing = Owner(mixing_format(weights))
        self._d = decoder.info.hidden_size
        config, carry = stream.config, stream.carry
        self.head = DraftHead.of(decoder, owner, stream.draft_tokens)
        features = stream.features
        self._packed_taps = (
            None
            if features is None
            else PackedTaps(decoder, features.taps, features.weight(), added=True)
        )
        self._adapters = (
            AdapterPack(self.adapters, decoder.info.num_layers, decoder.rotary_halves)
            if self.adapters
            else None
        )
        self.packed = decoder.stream(
            adapters=None if self._adapters is None else self._adapters.address,
            carry=abi.new("Linear") if carry is None else mixing.linear(carry.proj.weight),
            carry_norm=None if carry is None else owner.floats(carry.norm.weight),
            **_packed_fusion(mixing, stream.fusions, gate),
            **({} if self._packed_taps is None else self._packed_taps.fields()),
            carry_eps=config.norm_eps,
            exit_layer=gate,
        )
        if (deltas := _mergeable(self.adapters, gate)) is not None:
            self._merged = decoder.pack(0, owner, deltas)
            self.packed.merged = self._merged
            self.keys_only = True
        if self._block is not None:
            self.own_layer = OwnLayer(
                decoder,
                owner,
                pack_block(owner, self._block),
                heads=config.block_heads,
                kv_heads=config.block_kv_heads,
                head_dim=config.block_head_dim,
                intermediate=config.block_intermediate,
                theta=config.rope_theta,
                eps=config.norm_eps,
            )
            self.packed.block_shape = self.own_layer.shape
            self.packed.block = self.own_layer.layer

    def carried(self, hidden: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        return hidden if self._packed_taps is None else self._packed_taps.carried(hidden, taps)

    @cached_property
    def arla(self) -> abi.CData:
        """The stream's ARLA for the kernel, at the first gate only."""
        assert self._arla is not None
        weight, bias, out, out_bias = (part.detach() for part in self._arla.of_one_gate())
        return abi.new(
            "Scorer",
            weight=self._owner.floats(weight * self.decoder.norm_weight),
            bias=self._owner.floats(bias),
            out=self._owner.floats(out),
            out_bias=float(out_bias),
            latent=len(bias),
        )

    def agreement(self, p: Tensor) -> list[float]:
        rows, scores = p.float().contiguous(), np.empty(len(p))
        self._library.mr_scores(
            self.arla,
            self.decoder.eps,
            self._d,
            abi.tensor(rows),
            len(rows),
            abi.doubles(scores),
        )
        found: list[float] = scores.tolist()
        return found


def _packed_fusion(owner: Owner, fusions: nn.ModuleDict, gate: int) -> dict[str, Any]:
    """The fields of a Stream for its fusion at the gate, if it has one."""
    if not fusions:
        return {}
    fusion: Any = fusions[str(gate)]
    own = {
        "fuse_stream": owner.linear(fusion.stream.weight),
        "fuse_stream_norm": owner.floats(fusion.stream_norm.weight),
    }
    if fusion.carried is None:
        return own
    return own | {
        "fuse_carried": owner.linear(fusion.carried.weight),
        "fuse_carried_norm": owner.floats(fusion.carried_norm.weight),
    }


def _mergeable(adapters: Mapping[int, Any] | None, gate: int) -> dict[str, Tensor] | None:
    """What the adapters add to layer 0's weights, if they do nothing else and no slow layer runs
    while drafting. A draft then reads one set of weights, and verification needs only the keys and
    values of its slow rows.
    """
    if gate != 1 or not adapters:
        return None
    sites = dict(adapters[0].deltas())
    if not sites.keys() <= {"q", "o", "gate", "up", "down"} or not all(
        hasattr(s, "up") for s in sites.values()
    ):
        return None
    return {
        name: site.up.weight.detach().float() @ site.down.weight.detach().float()
        for name, site in sites.items()
    }


def pack_block(owner: Owner, block: GateBlock) -> abi.CData:
    """A gate's block as one more layer of the kernel."""
    attention, mlp = block.attn, block.mlp
    return abi.new(
        "Layer",
        qkv=owner.linear([attention.q.weight, attention.k.weight, attention.v.weight]),
        o=owner.linear(attention.o.weight),
        gate_up=owner.gate_up(mlp.gate.weight, mlp.up.weight),
        down=owner.linear(mlp.down.weight),
        norm_attention=owner.floats(block.attn_norm.weight),
        norm_mlp=owner.floats(block.mlp_norm.weight),
    )
