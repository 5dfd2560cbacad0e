"""Drafts of a FeatureStream (EAGLE, EAGLE-3)."""

from __future__ import annotations

import torch
from torch import Tensor

from multirate.methods._shared.draft_runner import DraftRunner, packed_where_possible
from multirate.methods._shared.feature_stream import FeatureStream
from multirate.methods._shared.stream_config import StreamDecodeConfig
from multirate.methods._shared.stream_drafter import StreamDrafter
from multirate.runtime.captured import Level
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache


class FeatureRunner(DraftRunner):
    """Runs the stream with its torch modules. It reads embeddings and carried features only:
    verification begins at layer 0.
    """

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


class FeatureDrafter(StreamDrafter):
    """Trees of a FeatureStream's likeliest tokens, as of the other draft branches."""

    def __init__(self, decoder: Decoder, stream: FeatureStream, config: StreamDecodeConfig) -> None:
        runner = FeatureRunner(decoder, stream)
        fastest = packed_where_possible(runner, stream.branch, config.weights)
        super().__init__(decoder, fastest, config)
