"""Registers token recycling."""

from __future__ import annotations

from multirate.methods.spec import MethodSpec, register
from multirate.methods.token_recycling.config import TokenRecyclingConfig
from multirate.methods.token_recycling.decode import TokenRecyclingDrafter

SPEC = register(
    MethodSpec(
        name="token_recycling",
        title="token recycling (arXiv 2408.08696, no training)",
        summary="drafts what the model itself held likely after the same tokens before",
        settings=TokenRecyclingConfig,
        tunable={"tree": ((4, 4, 3, 2), (2, 2), (3, 2, 1), (6, 5, 4, 3, 2))},
        drafter=lambda decoder, module, settings: TokenRecyclingDrafter(decoder, settings),
    )
)
