"""A trained method's own layer (its own keys and values) in the kernel's form."""

from __future__ import annotations

import torch
from torch import Tensor

from multirate.runtime.native import abi, library
from multirate.runtime.native.cache import NativeKVCache
from multirate.runtime.native.decoder import NativeDecoder
from multirate.runtime.native.packing import Owner
from multirate.runtime.native.positions import PositionTables, Tables
from multirate.runtime.rows import Rows


def tiles(
    decoder: NativeDecoder, heads: int, kv_heads: int, head_dim: int, intermediate: int = 0
) -> bool:
    """Whether the kernel can run such a layer beside ``decoder``'s (one head size, so one cache
    layout).
    """
    widths = (heads * head_dim, 2 * kv_heads * head_dim)
    return (
        head_dim == decoder.head_dim
        and all(width % 64 == 0 for width in widths)
        and intermediate % 32 == 0
    )


class OwnLayer:
    """``layer`` with rotary attention of base ``theta``; a layer without ``gate_up`` weights is
    attention alone.
    """

    def __init__(
        self,
        decoder: NativeDecoder,
        owner: Owner,
        layer: abi.CData,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        intermediate: int,
        theta: float,
        eps: float,
    ) -> None:
        self._decoder, self._owner, self._kv_heads = decoder, owner, kv_heads
        half = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") / (head_dim // 2)
        frequencies = theta**-half

        def compute(positions: Tensor) -> Tables:
            angle = positions[:, None] * frequencies
            return {None: {"cos": angle.cos(), "sin": angle.sin()}}

        self._positions = PositionTables(compute)
        layer.positions = self._positions.packed[None]
        self.shape = abi.new(
            "Shape",
            hidden=decoder.info.hidden_size,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=intermediate,
            vocab=0,
            rotary=head_dim,
            eps=eps,
            attention_scale=head_dim**-0.5,
            embed_scale=decoder.shape.embed_scale,
            residual_scale=1.0,
        )
        self.layer = layer

    @property
    def window(self) -> int | None:
        """How many of the newest tokens, its own among them, a row sees; None: all."""
        return int(self.layer.window) or None

    @window.setter
    def window(self, tokens: int | None) -> None:
        self.layer.window = tokens or 0

    def new_cache(self, batch: int, capacity: int) -> NativeKVCache:
        """An empty one-layer cache."""
        return self._decoder.cache_of(1, batch, capacity, self._kv_heads, self._positions)

    def rows(self, x: Tensor, rows: Rows, cache: NativeKVCache) -> Tensor:
        """x [N, d] → fp32 [N, d]; writes K/V at ``rows.slot``."""
        x = x.float().clone(memory_format=torch.contiguous_format)
        cache.make_room(rows)
        library.kernel().mr_layers(
            self._decoder.workspace.address,
            self.shape,
            self.layer,
            cache.address,
            abi.NULL,
            abi.rows_of(rows, cache.capacity),
            abi.tensor(x),
            0,
            1,
        )
        return x
