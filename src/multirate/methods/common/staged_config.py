"""Settings of lossless drafters: whether their steps are in stages, and which go without them."""

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

    staged_ahead: where at least so many of these have been verified by the copy, the rest is a
    draft behind them that has not been: the model's own weights read it at once. From `staged` on:
    all have been. [ours]
    """

    staged: int = 11
    staged_ahead: int = 5

    def check(self) -> None:
        super().check()
        self.require_count("staged_ahead")
        self.require(0 <= self.staged <= MAX_TREE_BIT, "staged", f"0 to {MAX_TREE_BIT}")


@dataclass(frozen=True)
class StagedTextConfig(StagedConfig):
    """direct_match: in stages, what follows a match in the text of at least so many tokens is
    verified by the model's own weights at once, without the narrow copy, which would take longer
    than it saves where nearly all of it is accepted; 0: never. [ours] The others: StagedConfig.
    """

    direct_match: int = 4

    def check(self) -> None:
        super().check()
        self.require_count("direct_match", least=0)
