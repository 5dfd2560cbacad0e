"""Drafts by looking the last n tokens up in prompt and output [Saxena 2023]. No model, no
training.
"""

from __future__ import annotations

from multirate.methods._shared.lookup import Lookup
from multirate.methods._shared.text_drafter import TextDrafter
from multirate.methods.prompt_lookup.config import PromptLookupConfig
from multirate.runtime.decoder import Decoder


class PromptLookupDrafter(TextDrafter):
    """The longest n-gram (n ≤ max_ngram) that occurred before proposes what followed its latest
    occurrence.
    """

    def __init__(self, decoder: Decoder, config: PromptLookupConfig) -> None:
        super().__init__(decoder, Lookup(config.max_ngram), config.tokens)
