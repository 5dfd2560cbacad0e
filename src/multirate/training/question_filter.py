"""Which of a model's sampled questions are worth an answer, and which repeat another one. [ours]"""

from __future__ import annotations

import re
from collections import Counter

from multirate.training.data import normalised

FEWEST_LETTERS = 8
MOST_CHARACTERS = 2000
LEAST_LETTER_SHARE = 0.4  # of what is not white space: code has fewer letters than prose
LEAST_DISTINCT = 0.5  # distinct runs of three words, of all: a text that goes round has few
ALIKE = 0.5  # runs of three words in common, of those of either text
OPENING_WORDS = 4
SHINGLE = 3


class QuestionFilter:
    """Takes questions one by one and compares each with those kept before it.

    same_opening: maximum number of questions that begin with the same four words. left_out: reason
    → count, for the user.
    """

    def __init__(self, same_opening: int) -> None:
        self._same_opening = same_opening
        self._texts: set[str] = set()
        self._sizes: list[int] = []
        self._having: dict[str, list[int]] = {}  # a run of words → the kept questions with it
        self._openings: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()

    def keep(self, text: str) -> bool:
        """Whether the question is new and usable; it is remembered if so, counted if not."""
        reason = self._unusable(text)
        words = _words(text)
        runs = _runs(words)
        if reason is None:
            reason = self._repeated(normalised(text), words, runs)
        if reason is not None:
            self.left_out[reason] += 1
            return False
        self._remember(normalised(text), words, runs)
        return True

    def add(self, text: str) -> None:
        """Remembers a question that is asked anyhow."""
        words = _words(text)
        self._remember(normalised(text), words, _runs(words))

    def _remember(self, text: str, words: list[str], runs: set[str]) -> None:
        self._texts.add(text)
        for run in runs:
            self._having.setdefault(run, []).append(len(self._sizes))
        self._sizes.append(len(runs))
        self._openings[_opening(words)] += 1

    def _unusable(self, text: str) -> str | None:
        letters = sum(character.isalpha() for character in text)
        if letters < FEWEST_LETTERS:
            return "too short"
        if len(text) > MOST_CHARACTERS:
            return "too long"
        if letters < LEAST_LETTER_SHARE * len("".join(text.split())):
            return "few letters"
        words = _words(text)
        if len(_runs(words)) < LEAST_DISTINCT * (len(words) - SHINGLE + 1):
            return "goes round"
        return None

    def _repeated(self, text: str, words: list[str], runs: set[str]) -> str | None:
        if text in self._texts:
            return "asked already"
        shared: Counter[int] = Counter()
        for run in runs:
            shared.update(self._having.get(run, ()))
        for index, count in shared.items():
            if count >= ALIKE * (len(runs) + self._sizes[index] - count):
                return "close to an earlier question"
        if self._openings[_opening(words)] >= self._same_opening:
            return "with a common beginning"
        return None


def _words(text: str) -> list[str]:
    """Words; of a text that is written without spaces, its characters."""
    words = re.findall(r"\w+", normalised(text))
    return words if sum(map(len, words)) < 12 * len(words) else list("".join(words))


def _runs(words: list[str]) -> set[str]:
    count = max(1, len(words) - SHINGLE + 1)
    return {" ".join(words[start : start + SHINGLE]) for start in range(count)}


def _opening(words: list[str]) -> str:
    return " ".join(words[:OPENING_WORDS])
