"""Drafting steps of a FeatureStream: on any decoder with its torch modules, on the native one in a
kernel call.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from multirate.methods._shared.config import DraftWeights
from multirate.methods._shared.draft_head import DraftHead
from multirate.methods._shared.draft_level import Level
from multirate.methods._shared.draft_runner import DraftRunner, NativeDraftRunner
from multirate.methods._shared.feature_stream import FeatureStream
from multirate.methods._shared.packed_layer import packed_layer
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.native import NativeDecoder
from multirate.runtime.native.formats import draft_format, mixing_format
from multirate.runtime.native.own_layer import tiles
from multirate.runtime.native.packing import Owner


class FeatureRunner(DraftRunner):
    """The stream reads embeddings and carried features only: verification begins at layer 0."""

    keys_only = True

    def __init__(self, decoder: Decoder, stream: FeatureStream) -> None:
        self.decoder = decoder
        self.stream = stream.to(device=decoder.info.device, dtype=decoder.info.dtype).eval()
        self.taps = stream.taps
        self._capture_on(decoder)

    def begin(self, cache: KVCache) -> None:
        self._begin(cache, self.stream.attn)

    def level_of(
        self, embedded: Tensor, carried: Tensor | None, level: Level
    ) -> tuple[Tensor, Tensor]:
        assert carried is not None
        dtype = self.decoder.info.dtype
        p = level.own(self.stream.rows, embedded.to(dtype), carried.to(dtype))
        return embedded, p.to(embedded.dtype)

    @torch.no_grad()
    def logits(self, p: Tensor) -> Tensor:
        return self.stream.logits(self.decoder, p)


class NativeFeatureRunner(NativeDraftRunner, FeatureRunner):
    """The same in the kernel, which has no torch in a step. weights: how what drafts is packed."""

    decoder: NativeDecoder

    @staticmethod
    def supports(decoder: Decoder, stream: FeatureStream) -> bool:
        """Whether the layer's shape tiles, and its norms' epsilon is the model's."""
        c = stream.config
        return (
            isinstance(decoder, NativeDecoder)
            and decoder.supports_fused
            and c.norm_eps == decoder.eps
            and tiles(decoder, c.heads, c.kv_heads, c.head_dim, c.intermediate)
        )

    @classmethod
    def where_supported(
        cls, decoder: Decoder, stream: FeatureStream, weights: DraftWeights
    ) -> FeatureRunner:
        """This runner on a decoder that it supports, else the one for any decoder."""
        if not cls.supports(decoder, stream):
            return FeatureRunner(decoder, stream)
        assert isinstance(decoder, NativeDecoder)
        return cls(decoder, stream, weights)

    def __init__(
        self, decoder: NativeDecoder, stream: FeatureStream, weights: DraftWeights
    ) -> None:
        super().__init__(decoder, stream)
        c, self._owner = stream.config, Owner(draft_format(weights))
        owner, self._mixing = self._owner, Owner(mixing_format(weights))
        norms = {"norm_mlp": owner.floats(stream.mlp_norm.weight), **self.layer_norms(owner)}
        self.own_layer = packed_layer(decoder, owner, stream.attn, stream.mlp, c.norm_eps, norms)
        self.head = self.draft_head(owner)
        self.packed = decoder.stream(
            block_shape=self.own_layer.shape,
            block=self.own_layer.layer,
            carry_eps=c.norm_eps,
            **self.stream_fields(self._mixing),
        )

    @abstractmethod
    def layer_norms(self, owner: Owner) -> dict[str, Any]:
        """The fields of Layer that say what attention reads, and through which norms."""

    @abstractmethod
    def draft_head(self, owner: Owner) -> DraftHead:
        """What outputs are read with."""

    @abstractmethod
    def stream_fields(self, owner: Owner) -> dict[str, Any]:
        """The other fields of Stream: how the layer's x comes about."""
