"""Registers SAM-Decoding."""

from __future__ import annotations

from multirate.methods.sam.config import SAMConfig
from multirate.methods.sam.decode import SAMDrafter
from multirate.methods.spec import MethodSpec, register

SPEC = register(
    MethodSpec(
        name="sam",
        plain_name="text lookup",
        title="SAM-Decoding (arXiv 2411.10666, no training)",
        summary="drafts what followed the longest suffix of the text that occurred before",
        settings=SAMConfig,
        tunable={"tokens": (7, 10, 16), "per_match": (2.0, 4.0)},
        drafter=lambda decoder, module, settings: SAMDrafter(decoder, settings),
        yardstick=True,
        recommended=True,
    )
)
