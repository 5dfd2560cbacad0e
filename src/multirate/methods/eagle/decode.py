"""EAGLE as a drafter: trees of its layer's likeliest tokens, as of the other trained streams."""

from __future__ import annotations

from typing import Any

from multirate.methods._shared.draft_head import DraftHead
from multirate.methods._shared.feature_runner import NativeFeatureRunner
from multirate.methods._shared.stream_drafter import StreamDrafter
from multirate.methods.eagle.config import EagleDecodeConfig
from multirate.methods.eagle.modules import EagleLayer
from multirate.runtime.decoder import Decoder
from multirate.runtime.native.packing import Owner


class NativeEagleRunner(NativeFeatureRunner):
    """The layer's x is a fusion of embedding and carried residual; the head is the model's."""

    stream: EagleLayer

    def layer_norms(self, owner: Owner) -> dict[str, Any]:
        return {}

    def draft_head(self, owner: Owner) -> DraftHead:
        return DraftHead.of(self.decoder, owner, self.stream.draft_tokens)

    def stream_fields(self, owner: Owner) -> dict[str, Any]:
        weight, d = self.stream.fc.weight, self.decoder.info.hidden_size
        return {
            "fuse_stream": owner.linear(weight[:, :d], self.stream.fc.bias),
            "fuse_carried": owner.linear(weight[:, d:]),
            "fuse_carried_norm": owner.floats(self.stream.carried_norm.weight),
        }


class EagleDrafter(StreamDrafter):
    """Drafts with an EagleLayer."""

    def __init__(
        self, decoder: Decoder, layer: EagleLayer, config: EagleDecodeConfig | None = None
    ) -> None:
        config = config or EagleDecodeConfig()
        runner = NativeEagleRunner.where_supported(decoder, layer, config.weights)
        super().__init__(decoder, runner, config)
