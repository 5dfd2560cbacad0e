"""Settings of drafts that grow from a trained draft branch (branch_drafter.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.methods._shared.lookup import LookupConfig
from multirate.runtime.draft_branch import DraftWeights
from multirate.runtime.rows import MAX_TREE_BIT

TUNABLE = {"nodes": (7, 11, 16), "depth": (4, 8), "width": (1, 2)}
"""The settings that shape a draft tree, with the values that `multirate tune` tries."""
MAX_DEPTH = 32
MAX_WINDOW = 1 << 30


@dataclass(frozen=True)
class BranchDecodeConfig(LookupConfig):
    """How draft trees grow. Shared by m2r2, m2r2-carry, eagle, eagle3 and kangaroo."""

    SHARPNESS: ClassVar[float] = 2.0
    """Path probabilities multiply softmax(SHARPNESS · logits) of the draft branch. A value above 1
    accounts for greedy verification: the probability that a token is the full model's argmax is
    larger than the probability of drawing it.
    """

    depth: int = 8
    """Maximum number of levels in a draft."""
    width: int = 2
    """Nodes drafted from per level."""
    nodes: int = 11
    """Maximum number of nodes verified at once."""
    draft_threshold: float | None = None
    """Minimum path probability of a node to draft from. Null: computed from measured costs, so that
    a node is added exactly when it raises the expected tokens per second.
    """
    verify_threshold: float | None = None
    """Minimum path probability of a leaf to verify. Null: computed from measured costs."""
    window: int | None = 256
    """How many of the newest tokens the draft branch's own layer attends to, on the native kernel.
    Of a long prompt, only these are read before the first draft. Null: all. [ours]
    """
    weights: DraftWeights = "int4"
    """How the native kernel packs weights that only draft: int4 reads a third of the memory, int8
    half, both with other drafts and the same text; bf16 is unquantised. [ours]
    """

    def check(self) -> None:
        super().check()
        for name, low, high in self.ranges():
            self.require(low <= getattr(self, name) <= high, name, f"{low} to {high}")
        self.require(
            self.window is None or 1 <= self.window <= MAX_WINDOW,
            "window",
            f"1 to {MAX_WINDOW}, or null",
        )
        self.require_share("draft_threshold", "verify_threshold")

    def ranges(self) -> list[tuple[str, int, int]]:
        """Whole-number fields: their names, minimum and maximum values."""
        return [
            ("depth", 1, MAX_DEPTH),
            ("width", 1, 16),
            ("nodes", 1, MAX_TREE_BIT),
        ]
