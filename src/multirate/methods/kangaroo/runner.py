"""One drafting step of Kangaroo: the target model's first layers, then the adapter."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from multirate.methods._shared.draft_runner import DraftRunner, packed_where_possible
from multirate.methods._shared.reduced_head import limited_to
from multirate.methods.kangaroo.modules import KangarooAdapter
from multirate.runtime.captured import Level
from multirate.runtime.decoder import Decoder
from multirate.runtime.draft_branch import DraftWeights
from multirate.runtime.kv_cache import KVCache


class KangarooRunner(DraftRunner):
    """Reads no carried residual: the stream is the slow residual itself, with the adapter at the
    exit.
    """

    stream: KangarooAdapter

    def __init__(self, decoder: Decoder, adapter: KangarooAdapter) -> None:
        # the decoder's residuals decide the dtype: the native kernel keeps them in fp32 whatever
        # the weights are
        probe = decoder.embed(
            torch.zeros(1, dtype=torch.int64, device=decoder.info.device), np.zeros(1, np.int32)
        )
        self.decoder = decoder
        self.module = adapter.to(device=decoder.info.device, dtype=probe.dtype)
        self.first_layers = adapter.config.exit_layer
        self._capture_on(decoder)

    def begin(self, cache: KVCache) -> None:
        self._begin(cache, self.module.attn)

    def level_of(
        self, embedded: Tensor, carried: Tensor | None, level: Level
    ) -> tuple[Tensor, Tensor]:
        x = level.slow(embedded)
        return x, level.own(self.module.rows, x)

    def logits(self, p: Tensor) -> Tensor:
        return limited_to(self.module.draft_tokens, self.decoder.logits(p))


def make_runner(decoder: Decoder, adapter: KangarooAdapter, weights: DraftWeights) -> DraftRunner:
    """The fastest runner for `decoder`. weights: how it packs what drafts."""
    return packed_where_possible(KangarooRunner(decoder, adapter), adapter.branch, weights)
