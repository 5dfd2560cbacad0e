"""A trained method's own layer (its own keys and values) in the kernel's form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multirate.runtime.draft_branch import BranchLayer, PackedLayer
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.native import abi, library
from multirate.runtime.native.cache import NativeKVCache
from multirate.runtime.native.packing import Owner
from multirate.runtime.native.positions import PositionTables, Tables
from multirate.runtime.rows import Rows

if TYPE_CHECKING:
    from multirate.runtime.native.decoder import NativeDecoder


def tiles(decoder: NativeDecoder, layer: BranchLayer) -> bool:
    """Whether the kernel can run `layer` beside the model's (one head size, so one cache
    layout).
    """
    widths = layer.heads * layer.head_dim, 2 * layer.kv_heads * layer.head_dim
    return (
        layer.head_dim == decoder.head_dim
        and all(width % 64 == 0 for width in widths)
        and layer.intermediate % 32 == 0
    )


class OwnLayer(PackedLayer):
    """A `BranchLayer` as one more layer of the kernel. packed, shape: for its structures."""

    def __init__(self, decoder: NativeDecoder, owner: Owner, layer: BranchLayer) -> None:
        self._decoder, self._owner, self._kv_heads = decoder, owner, layer.kv_heads
        half = torch.arange(layer.head_dim // 2, dtype=torch.float32, device="cpu")
        frequencies = layer.theta ** -(half / (layer.head_dim // 2))

        def compute(positions: Tensor) -> Tables:
            angle = positions[:, None] * frequencies
            return {None: {"cos": angle.cos(), "sin": angle.sin()}}

        self._positions = PositionTables(compute)
        fields: dict[str, Any] = {
            name: owner.floats(norm)
            for name in ("norm_attention", "norm_mlp", "norm_beside")
            if (norm := getattr(layer, name)) is not None
        }
        if layer.mlp is not None:
            gate, up, down = layer.mlp
            fields |= {"gate_up": owner.gate_up(gate, up), "down": owner.linear(down)}
        self.packed = abi.new(
            "Layer",
            qkv=owner.linear([layer.q, layer.k, layer.v]),
            o=owner.linear(layer.o),
            positions=self._positions.packed[None],
            **fields,
        )
        self.shape = abi.new(
            "Shape",
            hidden=decoder.info.hidden_size,
            heads=layer.heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            intermediate=layer.intermediate,
            vocab=0,
            rotary=layer.head_dim,
            eps=layer.eps,
            attention_scale=layer.head_dim**-0.5,
            embed_scale=decoder.shape.embed_scale,
            residual_scale=1.0,
        )

    @property
    def window(self) -> int | None:
        """How many of the newest tokens, its own among them, a row sees; None: all."""
        return int(self.packed.window) or None

    @window.setter
    def window(self, tokens: int | None) -> None:
        self.packed.window = tokens or 0

    def new_cache(self, batch: int, capacity: int) -> NativeKVCache:
        return self._decoder.cache_of(1, batch, capacity, self._kv_heads, self._positions)

    def rows(self, x: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        assert isinstance(cache, NativeKVCache)
        x = abi.copied(x)
        cache.make_room(rows)
        library.kernel().mr_layers(
            self._decoder.workspace.address,
            self.shape,
            self.packed,
            cache.address,
            abi.NULL,
            abi.rows_of(rows, cache.capacity),
            abi.tensor(x),
            0,
            1,
        )
        return x
