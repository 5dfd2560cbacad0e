"""Registers lookahead decoding."""

from __future__ import annotations

from multirate.methods.lookahead.decode import LookaheadConfig, LookaheadDrafter
from multirate.methods.spec import MethodSpec, register

SPEC = register(
    MethodSpec(
        name="lookahead",
        title="lookahead decoding (arXiv 2402.02057, no training)",
        summary="drafts n-grams that the model generates in parallel with the text",
        settings=LookaheadConfig,
        tunable={"ngram": (3, 4), "window": (2, 4, 6), "guesses": (1, 2, 4)},
        drafter=lambda decoder, module, settings: LookaheadDrafter(decoder, settings),
    )
)
