"""Registers plain decoding."""

from __future__ import annotations

from multirate.methods.spec import PLAIN, MethodSpec, register

SPEC = register(
    MethodSpec(
        name=PLAIN,
        title="our plain loop (the baseline)",
        summary="plain decoding, one token per pass: the baseline",
        drafter=lambda decoder, module, settings: None,
    )
)
