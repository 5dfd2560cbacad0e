"""Kangaroo as a drafter: chains from the exit layer and its adapter, stopped by low confidence; the
rest verifies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from multirate.methods._shared.stream_config import MAX_DEPTH, StreamDecodeConfig
from multirate.methods._shared.stream_drafter import StreamDrafter
from multirate.methods.kangaroo.modules import KangarooAdapter
from multirate.methods.kangaroo.runner import make_runner
from multirate.runtime.decoder import Decoder


@dataclass(frozen=True)
class KangarooDecodeConfig(StreamDecodeConfig):
    """StreamDecodeConfig with the paper's stopping rule, unless `lookup` is set, and a `width` of 1
    because the paper drafts chains.

    With `lookup`, drafts grow by measured costs instead, as in other methods. [ours]
    """

    METHOD: ClassVar[str] = "kangaroo"

    width: int = 1
    """As in StreamDecodeConfig."""
    sharpness: float = 1.0
    """As in StreamDecodeConfig."""
    threshold: float | None = None
    """Drafting stops after a token whose top-1 probability is below this; that token is still
    verified. Null: the accelerator's own.
    """
    max_draft: int | None = None
    """Maximum number of drafted tokens. Null: the accelerator's own."""

    def check(self) -> None:
        super().check()
        self.require(
            self.threshold is None or 0 <= self.threshold <= 1, "threshold", "null or 0 to 1"
        )
        self.require(
            self.max_draft is None or 1 <= self.max_draft <= MAX_DEPTH,
            "max_draft",
            f"null or 1 to {MAX_DEPTH}",
        )


class KangarooDrafter(StreamDrafter):
    """Layers [0, E) and the adapter draft; layers [E, L) verify the exact residuals that drafting
    left behind. Accepted tokens run through layers [0, E) and the adapter again before the next
    draft. [ours: the paper fills their K/V in later]
    """

    def __init__(
        self,
        decoder: Decoder,
        adapter: KangarooAdapter,
        config: KangarooDecodeConfig | None = None,
    ) -> None:
        config, own = config or KangarooDecodeConfig(), adapter.config
        threshold = config.threshold
        if not config.lookup:
            most = config.max_draft or min(own.max_draft, MAX_DEPTH)
            threshold = own.threshold if threshold is None else threshold
            # every node of a chain is verified, however unlikely
            config = replace(
                config, depth=most, nodes=most, draft_threshold=0.0, verify_threshold=0.0
            )
        elif config.max_draft:
            config = replace(config, depth=config.max_draft)
        super().__init__(
            decoder,
            make_runner(decoder, adapter, config.weights),
            config,
            start=own.exit_layer,
            carry=False,
            min_probability=threshold or 0.0,
        )
