"""Other texts that drafts are copied from, beside the one that is being written: the datastore of
REST [He et al. 2023, arXiv 2311.08252], the static automaton of SAM-Decoding's texts. In the
kernel: csrc/lookup.c.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from multirate.decoding.speculate.text_source import TextSource
from multirate.errors import UserError
from multirate.io import write_atomically

SORTED_BY = 16
"""Tokens that places are sorted by."""
LONGEST = 12
"""A longer match is told as one of this length."""
LEAST = 2
"""Of a match: a single token is somewhere in any texts. [ours]"""
OWN_LEAST = 2
"""A match of the text's own of so many tokens came true more often than any in other texts: 0.55 of
their first tokens and 0.73 of each next one, against 0.36 and 0.40 of matches of three tokens
there (lab/notes/drafting-without-training.md). [ours]
"""
FORMAT = "multirate texts 1"


class GivenTexts:
    """Texts of one tokenizer, one after another, and every place in them, sorted.

    tokens int32 [n]. order int32 [n]: places in `tokens`, sorted by the SORTED_BY tokens that begin
    there (at the end, fewer tokens come first). vocabulary: the tokenizer has so many tokens.

    So the places where given tokens begin are neighbours, found by bisection; and as these are
    sorted by what follows, the one in their middle is followed by what follows most of them, if
    anything does. [The middle: ours; REST makes a tree of them all.]
    """

    def __init__(
        self, tokens: NDArray[np.int32], order: NDArray[np.int32], vocabulary: int
    ) -> None:
        self.tokens, self.order, self.vocabulary = tokens, order, vocabulary

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]], vocabulary: int) -> GivenTexts:
        """These texts, sorted here: about a second for a million tokens."""
        parts = [np.asarray(text, np.int32) for text in texts]
        tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
        return cls(tokens, _sorted_places(tokens), vocabulary)

    @classmethod
    def load(cls, path: str | Path) -> GivenTexts:
        """Those that `save` wrote. UserError naming the file and what is wrong with it."""
        try:
            with safe_open(path, "np") as file:
                found = (file.metadata() or {}).get("format")
                if found != FORMAT:
                    raise UserError(
                        f"{path} is no file of texts: format {found!r}; accepted: {FORMAT!r}, "
                        "which `multirate texts` writes"
                    )
                tokens, order = file.get_tensor("tokens"), file.get_tensor("order")
                vocabulary = int(file.metadata()["vocabulary"])
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"cannot read the texts in {path}: {error}") from error
        count = tokens.size
        for name, array, limit in (("tokens", tokens, vocabulary), ("order", order, count)):
            whole = array.dtype == np.int32 and array.shape == (count,)
            if not whole or (count and not 0 <= array.min() <= array.max() < limit):
                raise UserError(
                    f"{path}: {name} is {array.dtype} {list(array.shape)}; accepted: int32 "
                    f"[{count}], from 0 to {limit - 1}"
                )
        return cls(tokens, order, vocabulary)

    @staticmethod
    def saved(path: Path) -> bool:
        """Whether a file is one that `save` wrote."""
        try:
            with safe_open(path, "np") as file:
                return bool((file.metadata() or {}).get("format") == FORMAT)
        except (OSError, SafetensorError, ValueError):
            return False

    def save(self, path: str | Path) -> None:
        """Writes them as safetensors."""
        metadata = {"format": FORMAT, "vocabulary": str(self.vocabulary)}
        write_atomically(path, save({"tokens": self.tokens, "order": self.order}, metadata))

    def look_up(self, end: Sequence[int], most: int) -> tuple[list[int], int]:
        """(what follows the longest end of `end` that occurs here, of LEAST to LONGEST tokens; how
        many these are). What follows has `most` tokens: it goes round at the end of the texts.
        ([], 0) where there is none.
        """
        matched = place = 0
        for length in range(1, min(LONGEST, len(end)) + 1):
            first, last = self._places(tuple(end[-length:]))
            if first == last:
                break
            matched, place = length, int(self.order[(first + last) // 2]) + length
        if matched < LEAST:
            return [], 0
        return self.tokens.take(range(place, place + most), mode="wrap").tolist(), matched

    def _places(self, tokens: tuple[int, ...]) -> tuple[int, int]:
        """The range of `order` whose places begin with these tokens."""
        ends = []
        for after in (False, True):
            low, high = 0, len(self.order)
            while low < high:
                middle = (low + high) // 2
                place = self.order[middle]
                here = tuple(self.tokens[place : place + len(tokens)].tolist())
                if here < tokens or (after and here == tokens):
                    low = middle + 1
                else:
                    high = middle
            ends.append(low)
        return ends[0], ends[1]


class WithGivenTexts(TextSource):
    """The text itself and given ones, which draft where the text's own match has less than
    OWN_LEAST tokens, and theirs more.

    A match of n tokens in given texts is told as one of `own.longest` + n, so that what came true
    of either is counted apart.
    """

    def __init__(self, own: TextSource, given: GivenTexts) -> None:
        super().__init__(own.longest + LONGEST)
        self._own, self._given = own, given

    def look_up(
        self, text: Sequence[int], most: int, drafted: Sequence[int] = ()
    ) -> tuple[list[int], int]:
        continuation, matched = self._own.look_up(text, most, drafted)
        if matched >= min(OWN_LEAST, self._own.longest):
            return continuation, matched
        found, length = self._given.look_up([*text[-LONGEST:], *drafted], most)
        return (found, self._own.longest + length) if length > matched else (continuation, matched)


def given_texts(name: str) -> GivenTexts:
    """The texts in a file. UserError if there is no such file."""
    path = Path(name)
    try:
        about = path.stat()
    except OSError:
        raise UserError(
            f"texts={name}: there is no such file; accepted: a file that `multirate texts` wrote"
        ) from None
    return _loaded(path, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=4)
def _loaded(path: Path, changed: int, size: int) -> GivenTexts:
    """A file as it was at a time: several methods of a run share it."""
    del changed, size
    return GivenTexts.load(path)


def _sorted_places(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """By prefix doubling: places' ranks by 2 m tokens are those of pairs of ranks by m."""
    count = len(tokens)
    rank, known = np.unique(tokens, return_inverse=True)[1].astype(np.int64), 1
    while known < SORTED_BY:
        later = np.zeros(count, np.int64)
        later[: max(count - known, 0)] = rank[known:] + 1
        rank, known = np.unique(rank * (count + 1) + later, return_inverse=True)[1], 2 * known
    return np.argsort(rank, kind="stable").astype(np.int32)
