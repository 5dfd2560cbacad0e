"""FREE as a depth policy."""

from __future__ import annotations

from multirate.methods.common.exit_head import ExitHead
from multirate.methods.common.linear_exits import maps_of
from multirate.methods.common.multi_exit import MultiExits
from multirate.methods.free.config import FreeDecodeConfig
from multirate.methods.free.modules import ShallowExit
from multirate.model.decoder import Decoder


def policy_of(decoder: Decoder, exits: ShallowExit, settings: FreeDecodeConfig) -> MultiExits:
    """The policy at the one exit."""
    head = ExitHead(decoder, exits.draft_tokens, settings.weights)
    return MultiExits(exits.exits, head, maps_of(decoder, exits), [settings.threshold])
