"""One drafting step of Kangaroo: the target model's first layers, then the adapter.

`KangarooRunner` runs it on any decoder with the adapter's torch module, `NativeKangarooRunner` in a
kernel call, so that Kangaroo is not slowed by another implementation.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from multirate.methods._shared.config import DraftWeights
from multirate.methods._shared.draft_head import DraftHead
from multirate.methods._shared.draft_level import Level
from multirate.methods._shared.draft_runner import DraftRunner, NativeDraftRunner
from multirate.methods._shared.packed_layer import packed_layer
from multirate.methods._shared.reduced_head import limited_to
from multirate.methods.kangaroo.modules import KangarooAdapter
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.native import NativeDecoder
from multirate.runtime.native.formats import draft_format
from multirate.runtime.native.own_layer import tiles
from multirate.runtime.native.packing import Owner


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
        self.stream = adapter.to(device=decoder.info.device, dtype=probe.dtype)
        self.first_layers = adapter.config.exit_layer
        self._capture_on(decoder)

    def begin(self, cache: KVCache) -> None:
        self._begin(cache, self.stream.attn)

    def level_of(
        self, embedded: Tensor, carried: Tensor | None, level: Level
    ) -> tuple[Tensor, Tensor]:
        x = level.slow(embedded)
        return x, level.own(self.stream.rows, x)

    def logits(self, p: Tensor) -> Tensor:
        return limited_to(self.stream.draft_tokens, self.decoder.logits(p))


class NativeKangarooRunner(NativeDraftRunner, KangarooRunner):
    """The same with packed copies of the adapter's weights and of the head that drafts are read
    with. weights: how these are packed.
    """

    decoder: NativeDecoder

    @staticmethod
    def supports(decoder: Decoder, adapter: KangarooAdapter) -> bool:
        """Whether the adapter's heads tile."""
        c = adapter.config
        return (
            isinstance(decoder, NativeDecoder)
            and decoder.supports_fused
            and tiles(decoder, c.heads, c.kv_heads, c.head_dim)
        )

    def __init__(
        self, decoder: NativeDecoder, adapter: KangarooAdapter, weights: DraftWeights
    ) -> None:
        super().__init__(decoder, adapter)
        c, owner = adapter.config, Owner(draft_format(weights))
        self._owner = owner
        norms = {"norm_attention": owner.floats(adapter.norm.weight)}
        self.own_layer = packed_layer(decoder, owner, adapter.attn, None, c.norm_eps, norms)
        self.head = DraftHead.of(decoder, owner, adapter.draft_tokens)
        self.packed = decoder.stream(
            block_shape=self.own_layer.shape,
            block=self.own_layer.layer,
            norm_out=owner.floats(adapter.norm_out.weight),
            exit_layer=c.exit_layer,
        )


def make_runner(
    decoder: Decoder, adapter: KangarooAdapter, weights: DraftWeights
) -> KangarooRunner:
    """The fastest runner for `decoder`. weights: of what drafts on the native kernel."""
    if NativeKangarooRunner.supports(decoder, adapter):
        assert isinstance(decoder, NativeDecoder)
        return NativeKangarooRunner(decoder, adapter, weights)
    return KangarooRunner(decoder, adapter)
