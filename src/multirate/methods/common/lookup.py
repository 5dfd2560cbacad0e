"""Which continuations of the text a method drafts, and by what they are found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from multirate.decoding.ngram import TextIndex
from multirate.decoding.suffix_automaton import SuffixAutomaton
from multirate.decoding.text_source import TextSource

LookupName = Literal["ngram", "sam"]
"""By n-grams of a few tokens, or by a suffix automaton, for matches of any length."""
_LONGEST = {"ngram": 4, "sam": 8}


@dataclass(frozen=True)
class Lookup:
    """How the text is looked up. longest: the longest match that is told, 0: it is not looked up;
    automaton: longer ones are found, too, and told as this long.
    """

    longest: int
    automaton: bool = False

    @staticmethod
    def of(setting: int | LookupName) -> Lookup:
        """What a setting means: a number is the longest n-gram."""
        if isinstance(setting, int):
            return Lookup(setting)
        return Lookup(_LONGEST[setting], automaton=setting == "sam")

    def source(self) -> TextSource:
        """For a new text."""
        return SuffixAutomaton(self.longest) if self.automaton else TextIndex(self.longest)
