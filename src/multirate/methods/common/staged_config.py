"""A setting of lossless drafters: whether their steps are in stages."""

from __future__ import annotations

from dataclasses import dataclass

from multirate.methods.common.config import MethodConfig
from multirate.model.rows import MAX_TREE_BIT


@dataclass(frozen=True)
class StagedConfig(MethodConfig):
    """staged: drafts are first verified with a narrow copy of the model's weights, and up to so
    many tokens of it at once by the model's own: lossless, and faster where the copy is read in
    much less time (stages.py). Decoding of one sequence by argmax, with or without temperature, on
    the native kernel, where the processor multiplies bytes; the copy is made after 300 tokens. 0:
    never. [ours]
    """

    staged: int = 11

    def check(self) -> None:
        super().check()
        self.require(0 <= self.staged <= MAX_TREE_BIT, "staged", f"0 to {MAX_TREE_BIT}")
