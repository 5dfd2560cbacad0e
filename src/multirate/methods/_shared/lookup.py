"""What a method drafts by text lookup: from the text itself or from other texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from multirate.decoding.speculate.given_texts import LONGEST as GIVEN_LONGEST
from multirate.decoding.speculate.given_texts import GivenTexts, WithGivenTexts, given_texts
from multirate.decoding.speculate.ngram import TextIndex
from multirate.decoding.speculate.suffix_automaton import SuffixAutomaton
from multirate.decoding.speculate.text_source import TextSource
from multirate.errors import UserError
from multirate.methods._shared.config import MethodConfig
from multirate.runtime.decoder import Decoder
from multirate.runtime.fused import Lookups

LONGEST = 8
"""Matches that a suffix automaton finds are told as no longer than this."""


@dataclass(frozen=True)
class Lookup(Lookups):
    given: GivenTexts | None = None
    """Other texts to search as well."""

    @staticmethod
    def of(texts: str | None, decoder: Decoder) -> Lookup:
        """Of matches of any length, with a decoder's model. texts: a file of other texts. Raises
        UserError for texts of another vocabulary.
        """
        given = None if texts is None else given_texts(texts)
        vocabulary = decoder.info.vocab_size
        if given is not None and given.vocabulary > vocabulary:
            raise UserError(
                f"texts={texts} were written for a vocabulary of {given.vocabulary} tokens, but "
                f"this model has {vocabulary}; write them again with `multirate texts` and this "
                "model"
            )
        return Lookup(LONGEST, True, given)

    @property
    def told(self) -> int:
        """The largest match number (see WithGivenTexts)."""
        return self.longest if self.given is None else self.longest + GIVEN_LONGEST

    def in_given(self, told: int) -> int:
        """Match length, in tokens, in other texts for this match number; 0: the match is in the
        text itself.
        """
        return max(told - self.longest, 0)

    def source(self) -> TextSource:
        own = SuffixAutomaton(self.longest) if self.automaton else TextIndex(self.longest)
        return own if self.given is None else WithGivenTexts(own, self.given)


@dataclass(frozen=True, kw_only=True)
class LookupConfig(MethodConfig):
    """Settings of drafters that can be combined with text lookup."""

    lookup: Literal["sam", 0] = 0
    """"sam": a draft may continue as the text did where its last tokens occurred before (suffix
    automaton, matches of any length). 0: no lookup. [ours]
    """
    texts: str | None = None
    """A file of other texts (`multirate texts`) to search as well, or a model's name for the texts
    that the package has for it. Null: none. [ours, as REST]
    """

    def check(self) -> None:
        super().check()
        self.require(
            self.texts is None or bool(self.lookup),
            "texts",
            "none without lookup; texts need lookup=sam",
        )
