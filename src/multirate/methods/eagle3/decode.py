"""EAGLE-3 as a drafter: trees of its layer's likeliest tokens, as of the other trained streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from multirate.methods._shared.draft_head import DraftHead
from multirate.methods._shared.feature_runner import NativeFeatureRunner
from multirate.methods._shared.packed_taps import PackedTaps
from multirate.methods._shared.stream_drafter import StreamDrafter
from multirate.methods.eagle3.config import Eagle3DecodeConfig
from multirate.methods.eagle3.modules import Eagle3Layer
from multirate.runtime.decoder import Decoder
from multirate.runtime.native.packing import Owner


class NativeEagle3Runner(NativeFeatureRunner):
    """Attention reads the embedding beside x; what is carried is a product of the taps."""

    stream: Eagle3Layer

    def layer_norms(self, owner: Owner) -> dict[str, Any]:
        beside = owner.floats(self.stream.embedding_norm.weight)
        carried = owner.floats(self.stream.carried_norm.weight)
        if self.stream.config.norm_before_residual:
            return {"norm_beside": beside}
        return {"norm_beside": beside, "norm_attention": carried}

    def draft_head(self, owner: Owner) -> DraftHead:
        stream = self.stream
        return DraftHead.own(owner, stream.head.weight, stream.draft_tokens, stream.norm.weight)

    def stream_fields(self, owner: Owner) -> dict[str, Any]:
        self._packed_taps = PackedTaps(self.decoder, self.taps, self.stream.features(), added=False)
        before = self.stream.config.norm_before_residual
        return {
            **self._packed_taps.fields(),
            "norm_in": owner.floats(self.stream.carried_norm.weight) if before else None,
        }

    def carried(self, hidden: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        return self._packed_taps.carried(hidden, taps)


class Eagle3Drafter(StreamDrafter):
    """Drafts with an Eagle3Layer."""

    def __init__(
        self, decoder: Decoder, layer: Eagle3Layer, config: Eagle3DecodeConfig | None = None
    ) -> None:
        config = config or Eagle3DecodeConfig()
        runner = NativeEagle3Runner.where_supported(decoder, layer, config.weights)
        super().__init__(decoder, runner, config)
