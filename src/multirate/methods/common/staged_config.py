"""A setting of lossless drafters: whether their steps are in stages."""

from __future__ import annotations

from dataclasses import dataclass

from multirate.methods.common.config import MethodConfig
from multirate.model.rows import MAX_TREE_BIT


@dataclass(frozen=True)
class StagedConfig(MethodConfig):
    """staged: drafts are verified with a narrow copy of the model's weights first, and up to so
    many of the resulting tokens at once by the model's own (stages.py); 0: never. [ours]
    """

    staged: int = 11

    def check(self) -> None:
        super().check()
        self.require(0 <= self.staged <= MAX_TREE_BIT, "staged", f"0 to {MAX_TREE_BIT}")
