"""Registers token recycling."""

from __future__ import annotations

from multirate.methods.spec import MethodSpec, register
from multirate.methods.token_recycling.decode import TokenRecyclingConfig, TokenRecyclingDrafter

SPEC = register(
    MethodSpec(
        name="token_recycling",
        title="token recycling (arXiv 2408.08696, no training)",
        summary="drafts the model's own top predictions after the same tokens earlier",
        settings=TokenRecyclingConfig,
        tunable={"nodes": (11, 16, 24), "k": (4, 8, 16)},
        drafter=lambda decoder, module, settings: settings.joined(
            TokenRecyclingDrafter(decoder, settings), decoder
        ),
    )
)
