"""When a sequence ends, and how a block of emitted tokens is cut there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from multirate.decoding.results import FinishReason
from multirate.errors import UserError

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class StopSettings:
    """When generation ends.

    Raises UserError naming the field, its value and what is accepted.
    """

    max_new_tokens: int | None = 256
    """Maximum number of new tokens; 0 emits none, None sets no limit."""
    eos_token_ids: tuple[int, ...] = ()
    """Each of these tokens ends a sequence and is its last token."""
    stop_strings: tuple[str, ...] = ()
    """A sequence ends with the token that completes one of these strings in the text of its new
    tokens, across token borders. That token is kept.
    """
    decode: Decode | None = None
    """Token ids → text, a tokenizer's `decode`; needed with stop_strings."""
    context_limit: int | None = None
    """Maximum of prompt and new tokens together. None: the model's number of positions."""
    ends: Callable[[int, list[int]], bool] | None = None
    """ends(b, tokens) says whether sequence b ends with the last of its new tokens; called after
    each token.
    """

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and not _whole(self.max_new_tokens, 0):
            raise UserError(
                f"max_new_tokens is {self.max_new_tokens!r}; accepted: a whole number of at least 0"
            )
        if self.context_limit is not None and not _whole(self.context_limit, 1):
            raise UserError(
                f"context_limit is {self.context_limit!r}; accepted: a whole number of at least 1"
            )
        ids = _several("eos_token_ids", self.eos_token_ids, int)
        for token in ids:
            if not _whole(token, 0):
                raise UserError(
                    f"eos_token_ids has {token!r}; accepted: token ids (whole numbers of at "
                    "least 0)"
                )
        strings = _several("stop_strings", self.stop_strings, str)
        for text in strings:
            if not isinstance(text, str) or not text:
                raise UserError(f"stop_strings has {text!r}; accepted: non-empty strings")
        if strings and self.decode is None:
            raise UserError("stop_strings need a tokenizer; pass its decode function as `decode`")
        object.__setattr__(self, "eos_token_ids", ids)
        object.__setattr__(self, "stop_strings", strings)


def _several(name: str, value: Any, kind: type) -> tuple[Any, ...]:
    """One value of a kind, or all of several."""
    try:
        return (value,) if isinstance(value, kind) else tuple(value)
    except TypeError:
        raise UserError(
            f"{name} is {value!r}; accepted: a {kind.__name__}, or a tuple of these"
        ) from None


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class _Ending:
    """Stop settings, as the tokens of a sequence are checked against them."""

    def __init__(self, settings: StopSettings) -> None:
        self.settings = settings
        self.eos = frozenset(settings.eos_token_ids)
        self._longest = max((len(text) for text in settings.stop_strings), default=0)

    def stops(self, seq: int, new: list[int]) -> bool:
        """Whether the sequence ends with the last of its new tokens."""
        if self._longest and self._completes_stop_string(new):
            return True
        return self.settings.ends is not None and self.settings.ends(seq, new)

    def _completes_stop_string(self, tokens: list[int]) -> bool:
        # Decode a tail only: long enough that a match ending in the last token lies inside it, with
        # a margin against what a decoder does at a text's left border (a leading space dropped).
        count = self._longest + 8
        while True:
            text = self._tail(tokens, count)
            if count >= len(tokens) or len(text) >= self._longest + 8:
                return any(stop in text for stop in self.settings.stop_strings)
            count *= 2

    def _tail(self, tokens: list[int], count: int) -> str:
        """The text of the last `count` tokens, or of up to three more where these begin in the
        middle of a character: some decoders give up all of a run of bytes that begins there.
        """
        decode = self.settings.decode
        assert decode is not None
        for more in range(4):
            text = decode(tokens[-count - more :])
            if count + more >= len(tokens) or not text.startswith("\ufffd"):
                break
        return text


class StopTracker:
    """The new tokens of every sequence of a batch, and whether it has ended.

    prompt_lengths: [B].
    max_positions: the model's limit; None if it has none.
    context: what error messages call that limit.

    Raises UserError if a prompt is longer than the context, or if nothing limits the output.
    """

    def __init__(
        self,
        settings: StopSettings,
        prompt_lengths: Sequence[int],
        max_positions: int | None,
        context: str = "the context",
    ) -> None:
        self._named = context
        self._positions = max_positions
        if self._context_of(settings) is None and settings.max_new_tokens is None:
            raise UserError(
                "max_new_tokens is none and the model has no context limit; set max_new_tokens "
                "to a whole number"
            )
        self._common = _Ending(settings)
        self._endings = [self._common for _ in prompt_lengths]
        self._room = [self._allowance(b, length) for b, length in enumerate(prompt_lengths)]
        self.new_tokens: list[list[int]] = [[] for _ in prompt_lengths]
        self.reasons: list[FinishReason | None] = [
            self._end_of_room(b) if room == 0 else None for b, room in enumerate(self._room)
        ]

    def restart(self, seq: int, prompt_length: int, settings: StopSettings | None = None) -> None:
        """Starts another prompt in place of a sequence that has ended and drops its new tokens.
        settings: its own; None: those of all. Raises UserError if the prompt is longer than the
        context.
        """
        self._endings[seq] = self._common if settings is None else _Ending(settings)
        room = self._allowance(seq, prompt_length)
        self._room[seq], self.new_tokens[seq] = room, []
        self.reasons[seq] = self._end_of_room(seq) if room == 0 else None

    def end(self, seq: int) -> None:
        """The sequence ends here, because nobody wants more of it."""
        if self.reasons[seq] is None:
            self._room[seq], self.reasons[seq] = len(self.new_tokens[seq]), "length"

    def _context_of(self, settings: StopSettings) -> int | None:
        limits = [limit for limit in (settings.context_limit, self._positions) if limit is not None]
        return min(limits) if limits else None

    def _allowance(self, seq: int, prompt_length: int) -> int:
        settings = self._endings[seq].settings
        context = self._context_of(settings)
        if context is not None and prompt_length > context:
            raise UserError(
                f"the prompt has {prompt_length} tokens; the maximum is {context} ({self._named})"
            )
        of_context = None if context is None else context - prompt_length
        bounds = [bound for bound in (settings.max_new_tokens, of_context) if bound is not None]
        return min(bounds)

    def _end_of_room(self, seq: int) -> FinishReason:
        most = self._endings[seq].settings.max_new_tokens
        return "length" if self._room[seq] == most else "context"

    def total_room(self, seq: int) -> int:
        """How many tokens the sequence may emit in total."""
        return self._room[seq]

    def remaining(self, seq: int) -> int:
        """How many tokens the sequence may still emit."""
        return 0 if self.reasons[seq] is not None else self._room[seq] - len(self.new_tokens[seq])

    def push(self, seq: int, block: list[int]) -> list[int]:
        """Appends a block of emitted tokens, cut at the first reason to end; returns the tokens
        kept.

        The result equals that of pushing the tokens one by one. A verified draft may contain an
        EOS, complete a stop string or exceed max_new_tokens at any place.
        """
        new = self.new_tokens[seq]
        before = len(new)
        for token in block[: self.remaining(seq)]:
            new.append(token)
            if token in self._endings[seq].eos:
                self.reasons[seq] = "eos"
            elif self._endings[seq].stops(seq, new):
                self.reasons[seq] = "stop_string"
            elif len(new) == self._room[seq]:
                self.reasons[seq] = self._end_of_room(seq)
            if self.reasons[seq] is not None:
                break
        return new[before:]
