"""Kangaroo's adapter on the native kernel, so that the rival is not slowed by another
implementation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multirate.methods.common.config import DraftWeights
from multirate.methods.common.fused_steps import DraftHead, FusedSteps
from multirate.methods.kangaroo.modules import KangarooAdapter
from multirate.model.kv_cache import KVCache
from multirate.model.native import NativeDecoder, abi
from multirate.model.native.cache import NativeKVCache
from multirate.model.native.own_layer import OwnLayer, tiles
from multirate.model.native.packing import Owner, draft_layout
from multirate.model.noise import Noise
from multirate.model.rows import Rows


class NativeKangarooAdapter:
    """``new_cache``, ``rows`` and ``top`` of a KangarooAdapter, with packed copies of its weights
    and of the head that drafts are read with. weights: how these are packed.
    """

    @staticmethod
    def supports(decoder: object, adapter: KangarooAdapter) -> bool:
        c = adapter.config
        if not isinstance(decoder, NativeDecoder) or not decoder.supports_fused:
            return False
        return tiles(decoder, c.heads, c.kv_heads, c.head_dim)

    def __init__(
        self, decoder: NativeDecoder, adapter: KangarooAdapter, weights: DraftWeights = "int8"
    ) -> None:
        c, attention, owner = adapter.config, adapter.attn, Owner(draft_layout(weights))
        layer = abi.new(
            "Layer",
            qkv=owner.linear(
                torch.cat([attention.q.weight, attention.k.weight, attention.v.weight])
            ),
            o=owner.linear(attention.o.weight),
            norm_attention=owner.floats(adapter.norm.weight),
        )
        self._layer = OwnLayer(
            decoder,
            owner,
            layer,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            intermediate=0,
            theta=c.rope_theta,
            eps=c.norm_eps,
        )
        self._decoder, self._norm_out, self._owner = decoder, adapter.norm_out, owner
        self.draft_tokens = adapter.draft_tokens
        self._head = DraftHead.of(decoder, owner, adapter.draft_tokens)

    def fused_steps(self, exit_layer: int, max_draft: int, threshold: float) -> FusedSteps:
        """Fused steps with Kangaroo's chains: the stream is the target's own, with this layer at
        the exit.
        """
        decoder = self._decoder
        stream = decoder.stream(
            block_shape=self._layer.shape,
            block=self._layer.layer,
            norm_out=self._owner.floats(self._norm_out.weight),
            exit_layer=exit_layer,
        )
        limits = abi.new(
            "DraftLimits", nodes=max_draft, width=1, top=1, sharpness=1.0, min_probability=threshold
        )
        return FusedSteps(decoder, stream, self._head, limits, refresh=True)

    def new_cache(self, batch: int, capacity: int) -> NativeKVCache:
        return self._layer.new_cache(batch, capacity)

    @torch.no_grad()
    def rows(self, x: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        """See ``KangarooAdapter.rows``."""
        assert isinstance(cache, NativeKVCache)
        out: Tensor = self._norm_out(self._layer.rows(x, rows, cache))
        return out

    def top(self, y: Tensor, noise: Sequence[Noise] | None = None) -> tuple[list[int], list[float]]:
        """The likeliest token after each row of y [n, d] and its probability. noise[i]: added to
        the logits of row i.
        """
        head = self._head
        ids, probs = self._decoder.top(
            head.linear, head.vocab, y, 1, noise=noise, token_map=head.token_map
        )
        drafted = [row[0] for row in ids]
        if self.draft_tokens is not None:
            drafted = self.draft_tokens[drafted].tolist()
        return drafted, [row[0] for row in probs]
