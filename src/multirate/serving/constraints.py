"""Holds an answer to a grammar: a JSON schema, a regular expression, one of several texts, or
llguidance's Lark.

llguidance says which tokens may come next. Drafts ask for the same of several continuations, so one
matcher goes back to where two of them part.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from multirate.errors import UserError
from multirate.serving.errors import ApiError

_WHITESPACE = r"[ \n\t]{0,16}"
"""Between JSON's tokens. Without a limit a small model may write spaces for ever."""


@dataclass(frozen=True)
class Constraint:
    kind: Literal["json", "regex", "lark"]
    source: Any
    """A schema, or text."""
    param: str
    """The field of the body that asks for it."""

    @classmethod
    def choice(cls, choices: Sequence[str], param: str) -> Constraint:
        """One of several texts."""
        texts = [json.dumps(one, ensure_ascii=False) for one in choices]
        return cls("lark", "start: " + " | ".join(texts), param)


class Grammars:
    """Makes matchers for a model's tokenizer. Any thread may use it."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = max(vocabulary, len(tokenizer))
        self._ends = ends
        self._lock = threading.Lock()
        self._known: Any = None

    def tokens(self) -> Any:
        """llguidance's form of the tokenizer, made on first use. Raises UserError if it cannot be
        made.
        """
        with self._lock:
            if self._known is None:
                self._known = self._make()
            return self._known

    def prepare(self) -> None:
        """Makes that form now, if it can be made: it takes a second for a large vocabulary, and
        nothing else runs meanwhile.
        """
        with suppress(UserError):
            self.tokens()

    def matcher(self, constraint: Constraint) -> Any:
        """A matcher at the beginning of a text. Raises ApiError for a grammar with an error and
        for one that matches nothing.
        """
        from llguidance import LLMatcher

        tokens = self.tokens()
        try:
            found = LLMatcher(tokens, _grammar(constraint), log_level=0)
        except ValueError as error:
            raise _refused(constraint, "cannot be read", str(error)) from None
        if found.is_error():
            raise _refused(constraint, "cannot be used", found.get_error())
        if _dead(found):
            raise _refused(constraint, "matches no text at all")
        return found

    def _make(self) -> Any:
        from llguidance.hf import from_tokenizer

        if not self._ends:
            raise UserError("a grammar needs a model with an end-of-text token; this one has none")
        try:
            return from_tokenizer(self._tokenizer, self._vocabulary, list(self._ends))
        except Exception as error:  # whatever a tokenizer of another kind makes it raise
            kind = type(self._tokenizer).__name__
            raise UserError(f"grammars do not work with this model's tokenizer, {kind}") from error


class Constrained:
    """A logits processor for one answer: tokens that leave the grammar get −inf."""

    def __init__(self, matcher: Any, prompt: int, after: int | None = None) -> None:
        """prompt: number of the prompt's tokens. after: the grammar begins after this token, which
        ends a thought that the prompt begins.
        """
        self._matcher = matcher
        self._prompt = prompt
        self._after = after
        self._taken: list[int] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        new = self._since_begin(ids[0, self._prompt :].tolist())
        if new is None:
            return scores
        if not self._follow(new):
            return scores  # a draft that left the grammar: nothing is emitted after it
        return scores.masked_fill(~self._allowed(scores), -torch.inf)

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that the tokenizer makes of the text that must follow. The grammar may admit
        other tokens for the same text.
        """
        new = self._since_begin(list(tokens[self._prompt :]))
        if new is None or not self._follow(new) or self._matcher.is_stopped():
            return []
        return list(self._matcher.compute_ff_tokens())

    def _since_begin(self, new: list[int]) -> list[int] | None:
        """The answer's tokens from where the grammar begins; None: it has not begun."""
        if self._after is None:
            return new
        return new[new.index(self._after) + 1 :] if self._after in new else None

    def _follow(self, new: list[int]) -> bool:
        """Takes the matcher to the end of these tokens; returns whether the grammar admits them."""
        same = 0
        for one, other in zip(self._taken, new, strict=False):
            if one != other:
                break
            same += 1
        if same < len(self._taken):
            self._matcher.rollback(len(self._taken) - same)
            del self._taken[same:]
        rest = new[same:]
        taken = self._matcher.try_consume_tokens(rest)
        self._taken += rest[:taken]
        return bool(taken == len(rest))

    def _allowed(self, scores: Tensor) -> Tensor:
        """Which tokens may follow, bool [V]."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise UserError(f"the grammar went too far: {_short(self._matcher.get_error())}")
        bits = np.unpackbits(mask, bitorder="little", count=scores.shape[-1])
        return torch.from_numpy(bits.astype(bool)).to(scores.device)


def _grammar(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    if constraint.kind == "json":
        return LLMatcher.grammar_from_json_schema(
            constraint.source, defaults={"whitespace_pattern": _WHITESPACE}
        )
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(constraint.source)
    return LLMatcher.grammar_from_lark(constraint.source)


def _dead(matcher: Any) -> bool:
    """Whether nothing can follow, which only a first mask shows."""
    probe = matcher.deep_copy()
    probe.compute_bitmask()
    return bool(probe.is_error())


def _refused(constraint: Constraint, fact: str, reason: str = "") -> ApiError:
    said = f"{constraint.param} {fact}"
    message = f"{said}: {_short(reason)}" if reason else said
    return ApiError(message, constraint.param.partition(".")[0], logged=said)


def _short(message: str) -> str:
    """The line of a message that says what is wrong: the one after "error:", else the first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    named = [line for line in lines if line.startswith("error: ")]
    return (named or lines)[0].removeprefix("error: ")[:200]
