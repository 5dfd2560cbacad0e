"""EAGLE-3 as a drafter: trees of its layer's likeliest tokens, as of the other draft branches."""

from __future__ import annotations

from multirate.methods._shared.feature_runner import feature_runner
from multirate.methods._shared.stream_drafter import StreamDrafter
from multirate.methods.eagle3.config import Eagle3DecodeConfig
from multirate.methods.eagle3.modules import Eagle3Layer
from multirate.runtime.decoder import Decoder


class Eagle3Drafter(StreamDrafter):
    """Drafts with an Eagle3Layer."""

    def __init__(
        self, decoder: Decoder, layer: Eagle3Layer, config: Eagle3DecodeConfig | None = None
    ) -> None:
        config = config or Eagle3DecodeConfig()
        super().__init__(decoder, feature_runner(decoder, layer, config.weights), config)
