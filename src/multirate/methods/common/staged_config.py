"""Settings of lossless drafters for two-stage verification."""

from __future__ import annotations

from dataclasses import dataclass

from multirate.methods.common.config import MethodConfig
from multirate.model.rows import MAX_TREE_BIT


@dataclass(frozen=True)
class StagedConfig(MethodConfig):
    """Two-stage verification: a quantised copy of the model verifies drafts first, and the
    full-precision weights then verify several of its tokens in one pass. Lossless.

    It needs one sequence, decoding by argmax (with or without temperature), and the native kernel
    on a processor with byte multiplication; otherwise drafts are verified directly. [ours]
    """

    staged: int = 11
    """Maximum number of pre-verified tokens in one full-precision pass; 0 turns two-stage
    verification off. The quantised copy is made after 300 tokens.
    """
    staged_ahead: int = 5
    """Once this many tokens are pre-verified, the rest of the pass may be a draft that the copy has
    not seen. From `staged` on, every token is pre-verified.
    """

    def check(self) -> None:
        super().check()
        self.require_count("staged_ahead")
        self.require(0 <= self.staged <= MAX_TREE_BIT, "staged", f"0 to {MAX_TREE_BIT}")


@dataclass(frozen=True)
class StagedTextConfig(StagedConfig):
    """StagedConfig for methods that also look up text."""

    direct_match: int = 4
    """After a text match of at least this many tokens, the full-precision weights verify the
    continuation directly: nearly all of it is accepted, so the quantised copy would cost more time
    than it saves. 0: never. [ours]
    """

    def check(self) -> None:
        super().check()
        self.require_count("direct_match", least=0)
