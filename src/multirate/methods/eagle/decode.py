"""EAGLE as a drafter: trees of its layer's likeliest tokens, as of the other draft branches."""

from __future__ import annotations

from multirate.methods._shared.feature_runner import feature_runner
from multirate.methods._shared.stream_drafter import StreamDrafter
from multirate.methods.eagle.config import EagleDecodeConfig
from multirate.methods.eagle.modules import EagleLayer
from multirate.runtime.decoder import Decoder


class EagleDrafter(StreamDrafter):
    """Drafts with an EagleLayer."""

    def __init__(
        self, decoder: Decoder, layer: EagleLayer, config: EagleDecodeConfig | None = None
    ) -> None:
        config = config or EagleDecodeConfig()
        super().__init__(decoder, feature_runner(decoder, layer, config.weights), config)
