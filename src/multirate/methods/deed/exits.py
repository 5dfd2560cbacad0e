"""DEED as a depth policy."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from multirate.methods.common.exit_head import ExitHead
from multirate.methods.common.least_squares import direction
from multirate.methods.common.multi_exit import MultiExits, torch_maps
from multirate.methods.deed.config import DeedDecodeConfig
from multirate.methods.deed.modules import EPS, AdaptedExits
from multirate.model.decoder import Decoder
from multirate.model.native import NativeDecoder
from multirate.model.native.packing import Owner


def policy_of(decoder: Decoder, exits: AdaptedExits, settings: DeedDecodeConfig) -> MultiExits:
    """The policy, the same threshold at every exit."""
    head = ExitHead(decoder, exits.draft_tokens, settings.weights)
    thresholds = [settings.threshold] * len(exits.exits)
    return MultiExits(exits.exits, head, _maps_of(decoder, exits), thresholds)


def _maps_of(decoder: Decoder, exits: AdaptedExits) -> Callable[[int, Tensor], Tensor]:
    if isinstance(decoder, NativeDecoder):
        return _PackedAdapters(decoder, exits)
    return torch_maps(exits, decoder.info.device)


class _PackedAdapters:
    """The adapters in the kernel's form, as exact as the model's own weights."""

    def __init__(self, decoder: NativeDecoder, exits: AdaptedExits) -> None:
        self._decoder, self._owner = decoder, Owner()
        self._adapters = {}
        for exit in exits.exits:
            adapter = exits.adapter(exit)
            self._adapters[exit] = self._owner.bottleneck(adapter.down.weight, adapter.up.weight)

    def __call__(self, exit: int, hidden: Tensor) -> Tensor:
        down, up = self._adapters[exit]
        read = direction(hidden, EPS)
        middle = F.silu(self._decoder.product(down, read, None))
        return self._decoder.product(up, middle, None, into=read)
