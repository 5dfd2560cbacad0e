"""Registers prompt lookup."""

from __future__ import annotations

from multirate.methods.prompt_lookup.config import PromptLookupConfig
from multirate.methods.prompt_lookup.decode import PromptLookupDrafter
from multirate.methods.spec import MethodSpec, register

SPEC = register(
    MethodSpec(
        name="prompt_lookup",
        title="prompt lookup (no training)",
        summary="drafts what followed the last few tokens earlier in the text",
        settings=PromptLookupConfig,
        tunable={"tokens": (4, 7, 10, 16), "max_ngram": (2, 3, 5)},
        drafter=lambda decoder, module, settings: PromptLookupDrafter(decoder, settings),
    )
)
