"""LITE as a depth policy."""

from __future__ import annotations

from multirate.methods.common.exit_head import ExitHead
from multirate.methods.common.linear_exits import maps_of
from multirate.methods.common.multi_exit import MultiExits
from multirate.methods.lite.config import LiteDecodeConfig
from multirate.methods.lite.modules import LiteExits
from multirate.model.decoder import Decoder


def policy_of(decoder: Decoder, exits: LiteExits, settings: LiteDecodeConfig) -> MultiExits:
    """The policy at the exits' thresholds. UserError for thresholds that do not fit them."""
    thresholds = exits.config.thresholds if settings.thresholds is None else settings.thresholds
    head = ExitHead(decoder, exits.draft_tokens, settings.weights)
    return MultiExits(exits.exits, head, maps_of(decoder, exits), thresholds)
