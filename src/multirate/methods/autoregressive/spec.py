"""Registers plain decoding."""

from __future__ import annotations

from multirate.methods.spec import PLAIN, MethodSpec, register

SPEC = register(
    MethodSpec(
        name=PLAIN,
        title="our plain loop (the baseline)",
        summary="decodes one token per pass, without drafts: the baseline",
        drafter=lambda decoder, module, settings: None,
    )
)
