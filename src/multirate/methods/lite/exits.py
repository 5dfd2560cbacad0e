"""LITE as a depth policy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from multirate.methods.common.exit_head import ExitHead
from multirate.methods.common.multi_exit import MultiExits, torch_maps
from multirate.methods.lite.config import LiteDecodeConfig
from multirate.methods.lite.modules import EPS, LinearExits
from multirate.model.decoder import Decoder
from multirate.model.native import NativeDecoder
from multirate.model.native.packing import Owner


def policy_of(decoder: Decoder, exits: LinearExits, settings: LiteDecodeConfig) -> MultiExits:
    """The policy at the exits' thresholds. UserError for thresholds that do not fit them."""
    thresholds = exits.config.thresholds if settings.thresholds is None else settings.thresholds
    head = ExitHead(decoder, exits.draft_tokens, settings.weights)
    return MultiExits(exits.exits, head, _maps_of(decoder, exits), thresholds)


def _maps_of(decoder: Decoder, exits: LinearExits) -> Callable[[int, Tensor], Tensor]:
    if isinstance(decoder, NativeDecoder):
        return _PackedMaps(decoder, exits)
    return torch_maps(exits, decoder.info.device)


class _PackedMaps:
    """The maps in the kernel's form, as exact as the model's own weights."""

    def __init__(self, decoder: NativeDecoder, exits: LinearExits) -> None:
        self._decoder, self._owner = decoder, Owner()
        self._maps = {exit: self._owner.linear(exits.map(exit).weight) for exit in exits.exits}
        self._ones = self._owner.floats(torch.ones(decoder.info.hidden_size))

    def __call__(self, exit: int, hidden: Tensor) -> Tensor:
        every = self._decoder.product(self._maps[exit], hidden, self._ones, eps=EPS)
        return every[:, : self._decoder.info.hidden_size]
