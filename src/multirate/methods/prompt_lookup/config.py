"""Settings of prompt lookup."""

from __future__ import annotations

from dataclasses import dataclass

from multirate.errors import UserError


@dataclass(frozen=True)
class PromptLookupConfig:
    """max_ngram: longest n-gram looked up (shorter ones are tried next). tokens: length of a draft."""

    max_ngram: int = 3
    tokens: int = 10

    def __post_init__(self) -> None:
        for name in ("max_ngram", "tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"prompt_lookup's {name} is {value!r}; accepted is a whole number of at least 1")
