"""Drafts by a suffix automaton of prompt and output [Hu et al. 2024]. No model, no training."""

from __future__ import annotations

from dataclasses import replace

from multirate.methods._shared.lookup import Lookup
from multirate.methods._shared.text_drafter import TextDrafter
from multirate.methods.sam.config import SAMConfig
from multirate.runtime.decoder import Decoder


class SAMDrafter(TextDrafter):
    """The longest end of the text that occurred before, however long, proposes what followed; its
    length decides whether and how much.
    """

    def __init__(self, decoder: Decoder, config: SAMConfig) -> None:
        lookup = Lookup.of(config.texts, decoder)
        if lookup.given is None:
            lookup = replace(lookup, longest=config.longest)  # no more need be told
        super().__init__(decoder, lookup, config.tokens, config.length)
