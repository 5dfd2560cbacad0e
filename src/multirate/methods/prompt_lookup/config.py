"""Settings of prompt lookup."""

from __future__ import annotations

from dataclasses import dataclass

from multirate.methods.common.config import MethodConfig


@dataclass(frozen=True)
class PromptLookupConfig(MethodConfig):
    """max_ngram: longest n-gram looked up (shorter ones are tried next). tokens: length of a
    draft.
    """

    max_ngram: int = 3
    tokens: int = 10

    def check(self) -> None:
        for name in self.names():
            self.require(getattr(self, name) >= 1, name, "a whole number of at least 1")
