"""The token ids of a model's answers, in the records of `multirate answers` beside their text.

Text alone is not enough. A chat template adds an end to an answer that was cut off, puts thoughts
before one or drops them from earlier ones, and tokenising text again can give other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from multirate.decoding.results import FinishReason
from multirate.errors import UserError

MARK, ANSWERS = "multirate", "answers"
"""The first field of a record, and its value."""
_ENDED = get_args(FinishReason)
_MOST_ID = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class Said:
    """prompt, answer: token ids int32, the answer's with the one that ended it. ended: why the
    answer ended.
    """

    prompt: NDArray[np.int32]
    answer: NDArray[np.int32]
    ended: FinishReason

    @classmethod
    def of(cls, prompt: Sequence[int], answer: Sequence[int], ended: FinishReason) -> Said:
        return cls(np.asarray(prompt, np.int32), np.asarray(answer, np.int32), ended)

    @property
    def cut_off(self) -> bool:
        """Whether the model was not done."""
        return self.ended in ("length", "context")

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt.tolist(),
            "answer": self.answer.tolist(),
            "ended": self.ended,
        }


def is_own(record: Any) -> bool:
    """Whether `multirate answers` wrote a record."""
    return isinstance(record, dict) and record.get(MARK) == ANSWERS


def read_said(record: dict[str, Any], where: str) -> tuple[Said, ...]:
    """A record's answers, in the order of its assistant turns. Raises UserError for values that
    were not written by `multirate answers`.
    """
    found = record.get("said")
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise UserError(f"{where}: field 'said' must be a list of {{'prompt', 'answer', 'ended'}}.")
    for one in found:
        for name in ("prompt", "answer"):
            ids = one.get(name)
            if not isinstance(ids, list) or not all(
                type(token) is int and 0 <= token <= _MOST_ID for token in ids
            ):
                raise UserError(f"{where}: '{name}' in field 'said' must be a list of token ids.")
        if one.get("ended") not in _ENDED:
            raise UserError(f"{where}: 'ended' in field 'said' must be one of {', '.join(_ENDED)}.")
    return tuple(Said.of(one["prompt"], one["answer"], one["ended"]) for one in found)


def said_by(tokenizer: Any, said: Sequence[Said], texts: Sequence[str]) -> bool:
    """Whether these are the tokens of these texts: not where the tokenizer is another one, or the
    text was edited.
    """
    if len(said) != len(texts):
        return False
    most = max(
        (int(ids.max()) for one in said for ids in (one.prompt, one.answer) if len(ids)), default=0
    )
    return most < len(tokenizer) and all(
        text_of(tokenizer, one.answer.tolist()) == text
        for one, text in zip(said, texts, strict=True)
    )


def text_of(tokenizer: Any, answer: Sequence[int]) -> str:
    """An answer's text, without the tokens that end it."""
    return str(tokenizer.decode(list(answer), skip_special_tokens=True))


def samples_of(said: Sequence[Said]) -> list[list[tuple[list[int], bool]]]:
    """The training samples of a conversation, each in parts: (ids, whether the model said them).

    A later answer is in the sample of those before it where its prompt goes on from them. Where a
    chat template rewrites earlier turns, as those do that leave out thoughts, it has its own.
    """
    samples: list[list[tuple[list[int], bool]]] = []
    done: list[int] = []
    for one in said:
        prompt, answer = one.prompt.tolist(), one.answer.tolist()
        if samples and prompt[: len(done)] == done:
            samples[-1] += [(prompt[len(done) :], False), (answer, True)]
        else:
            samples.append([(prompt, False), (answer, True)])
        done = prompt + answer
    return samples
