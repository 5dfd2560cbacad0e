"""Hydra's heads beside a decoder: with their torch modules on any, packed on the native one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from multirate.methods._shared.captured_runner import Likeliest, likeliest_of, top_rows
from multirate.methods._shared.config import DraftWeights
from multirate.methods._shared.draft_head import DraftHead
from multirate.methods._shared.heads_runner import HeadsRunner
from multirate.methods._shared.packed_layer import packed_layer
from multirate.methods.hydra.modules import HydraHeads
from multirate.runtime.cuda.captured_rows import StaticSlots
from multirate.runtime.cuda.decoder import GraphedDecoder
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.native import NativeDecoder, abi
from multirate.runtime.native.cache import NativeKVCache
from multirate.runtime.native.formats import draft_format
from multirate.runtime.native.own_layer import tiles
from multirate.runtime.native.packing import Owner
from multirate.runtime.noise import Noise
from multirate.runtime.rows import Rows
from multirate.runtime.transfer import to_device


class HydraRunner(HeadsRunner):
    """What drafting needs of the heads."""

    heads: HydraHeads

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for `prefixed`."""
        return self.heads.prefix.attn.new_cache(batch, capacity, self._captured)

    def prefixed(self, hidden: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        """Prefix layer and final norm, h_L → x: [n, d] each; writes K/V at ``rows.slot``."""
        return self._over(self._prefixed_rows, rows, cache, hidden)

    def student(self, k: int, z: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """z [n, k · d] of head k - 1 (of the first head: x) and the next tokens' embeddings [n, d]
        → z of head k, and what head k says [n, d], normed.
        """
        z = self.heads.joined(z, embedded)
        return z, self._said(k, z)

    def best(
        self,
        k: int,
        z: Tensor,
        tokens: Sequence[int],
        positions: NDArray[np.int32],
        count: int,
        noise: Sequence[Noise] | None = None,
    ) -> tuple[Tensor, Likeliest]:
        """`student` of the next tokens, and `top` of what it says."""
        decoder = self.decoder
        if noise is not None or self._captured is None:
            ids = torch.tensor(tokens, device=decoder.info.device, dtype=torch.int64)
            z, said = self.student(k, z, decoder.embed(ids, positions))
            return z, self.top(said, count, noise)
        assert isinstance(decoder, GraphedDecoder)
        parts, count = decoder.parts, min(count, decoder.info.vocab_size)

        def level(z: Tensor, numbers: Tensor) -> Tensor:
            z, said = self.student(k, z, parts.embed(*numbers.unbind(1)))
            return torch.cat([z.double(), top_rows(self.logits, count, 1.0, said)], dim=-1)

        numbers = to_device(np.stack([tokens, positions], axis=1).astype(np.int64), z.device)
        found = self._captured.alone(
            ("head", k, count), level, z, numbers, judged=partial(_without_ids, count)
        )
        return found[:, : -2 * count].to(z.dtype), likeliest_of(found[:, -2 * count :])

    def _said(self, k: int, z: Tensor) -> Tensor:
        """See HydraHeads.student."""
        return self.heads.student(k, z)

    def _prefixed_rows(
        self, hidden: Tensor, rows: Rows | StaticSlots, cache: KVCache | None
    ) -> Tensor:
        return self.decoder.norm(self.heads.prefix.rows(hidden, rows, cache))


class NativeHydraRunner(HydraRunner):
    """The same with packed copies of all weights. weights: how they are packed."""

    decoder: NativeDecoder

    @staticmethod
    def where_supported(decoder: Decoder, heads: HydraHeads, weights: DraftWeights) -> HydraRunner:
        """This runner on a decoder that it supports, else the one for any decoder."""
        attn, inner = heads.prefix.attn, heads.prefix.mlp.gate.out_features
        if (
            isinstance(decoder, NativeDecoder)
            and decoder.supports_fused
            and tiles(decoder, attn.heads, attn.kv_heads, attn.head_dim, inner)
        ):
            return NativeHydraRunner(decoder, heads, weights)
        return HydraRunner(decoder, heads)

    def __init__(self, decoder: NativeDecoder, heads: HydraHeads, weights: DraftWeights) -> None:
        super().__init__(decoder, heads)
        owner = self._owner = Owner(draft_format(weights))
        self._head = DraftHead.of(decoder, owner, heads.draft_tokens)
        self._layers = [_packed(head, owner) for head in heads.heads]
        layer = heads.prefix
        norms = {
            "norm_attention": owner.floats(layer.attn_norm.weight),
            "norm_mlp": owner.floats(layer.mlp_norm.weight),
        }
        eps = layer.attn_norm.eps
        self._prefix = packed_layer(decoder, owner, layer.attn, layer.mlp, eps, norms)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return self._prefix.new_cache(batch, capacity)

    def prefixed(self, hidden: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        assert isinstance(cache, NativeKVCache)
        return self.decoder.norm(self._prefix.rows(hidden, rows, cache))

    def _said(self, k: int, z: Tensor) -> Tensor:
        first, *later = self._layers[k - 1]
        d = self.decoder.info.hidden_size
        both = self.decoder.product(first, z, None)
        y = z[:, :d] + both[:, :d] + F.silu(both[:, d : 2 * d])
        for layer in later:
            y = y + F.silu(self.decoder.product(layer, y, None)[:, :d])
        return y

    def top(
        self, said: Tensor, count: int, noise: Sequence[Noise] | None = None
    ) -> tuple[list[list[int]], list[list[float]]]:
        return self._head.top(self.decoder, said, count, noise=noise, normed=True)


def _without_ids(count: int, found: Tensor) -> Tensor:
    """z and probabilities: tokens as likely may change places."""
    return torch.cat([found[:, : -2 * count], found[:, -count:]], dim=-1)


def _packed(head: Any, owner: Owner) -> list[abi.CData]:
    """The layers of a HydraHead in order; the two maps that read z are one."""
    both = torch.cat([head.residual.weight, head.first.weight])
    return [owner.linear(both), *(owner.linear(layer.weight) for layer in head.later)]
