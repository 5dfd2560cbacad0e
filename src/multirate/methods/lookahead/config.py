"""Settings of lookahead decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.decoding.speculate.drafter import MAX_TREE_NODES
from multirate.methods._shared.config import MethodConfig


@dataclass(frozen=True)
class LookaheadConfig(MethodConfig):
    """A pass has (ngram − 1) · (window + guesses) more rows than a plain one."""

    METHOD: ClassVar[str] = "lookahead"

    ngram: int = 3
    """Tokens in an n-gram (the paper's N)."""
    window: int = 4
    """Positions guessed ahead (W)."""
    guesses: int = 2
    """N-grams verified at once (G)."""

    def check(self) -> None:
        super().check()
        self.require(self.ngram >= 2, "ngram", "a whole number of at least 2")
        self.require_count("window", "guesses")
        self.require(
            self.window >= self.ngram - 2, "window", f"at least ngram − 2, here {self.ngram - 2}"
        )
        self.require(
            self.nodes <= MAX_TREE_NODES,
            "window",
            f"such that (ngram − 1) · (window + guesses) is at most {MAX_TREE_NODES}, the "
            "maximum number of tree nodes",
        )

    @property
    def nodes(self) -> int:
        """Maximum number of nodes in a draft."""
        return (self.ngram - 1) * (self.window + self.guesses)
