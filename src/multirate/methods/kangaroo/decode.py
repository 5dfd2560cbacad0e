"""Kangaroo as a drafter: chains from the exit layer and its adapter, stopped by low confidence; the
rest verifies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from multirate.methods._shared.branch_config import MAX_DEPTH, BranchDecodeConfig
from multirate.methods._shared.branch_drafter import BranchDrafter
from multirate.methods.kangaroo.modules import KangarooAdapter
from multirate.methods.kangaroo.runner import make_runner
from multirate.runtime.decoder import Decoder


@dataclass(frozen=True)
class KangarooDecodeConfig(BranchDecodeConfig):
    """BranchDecodeConfig with the paper's stopping rule, unless `lookup` is set, and a `width` of 1
    because the paper drafts chains.

    With `lookup`, drafts grow by measured costs instead, as in other methods. [ours]
    """

    METHOD: ClassVar[str] = "kangaroo"

    SHARPNESS: ClassVar[float] = 1.0

    width: int = 1
    """Nodes drafted from per level; 1: chains, as in the paper."""
    threshold: float = 0.6
    """Without lookup, drafting stops after a token whose top-1 probability is below this; that
    token is still verified.
    """
    max_draft: int = 6
    """Without lookup, the maximum number of drafted tokens."""

    def check(self) -> None:
        super().check()
        self.require(0 <= self.threshold <= 1, "threshold", "0 to 1")
        self.require(1 <= self.max_draft <= MAX_DEPTH, "max_draft", f"1 to {MAX_DEPTH}")


class KangarooDrafter(BranchDrafter):
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
        config = config or KangarooDecodeConfig()
        if not config.lookup:
            # every node of a chain is verified, however unlikely
            most = config.max_draft
            config = replace(
                config, depth=most, nodes=most, draft_threshold=0.0, verify_threshold=0.0
            )
        super().__init__(
            decoder,
            make_runner(decoder, adapter, config.weights),
            config,
            start=adapter.config.exit_layer,
            carry=False,
            min_probability=0.0 if config.lookup else config.threshold,
        )
