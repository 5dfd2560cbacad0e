"""What a stream reads of the target model's inner layers, on the kernel: one product of the
residuals entering its taps, once a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from multirate.runtime.native import NativeDecoder, abi, library
from multirate.runtime.native.packing import Owner


class PackedTaps:
    """W [d, taps · d], of the residuals side by side. added: the product is added to h_L, instead
    of taking its place.
    """

    def __init__(
        self, decoder: NativeDecoder, taps: tuple[int, ...], weight: Tensor, added: bool
    ) -> None:
        # residuals of single channels are far above the others: 16 bits, whatever drafts have
        self._owner = Owner()
        self._weight = self._owner.linear(weight)
        self._decoder, self._taps, self._added = decoder, taps, added

    def fields(self) -> dict[str, Any]:
        """Those of Stream that say so."""
        return {
            "taps": list(self._taps),
            "tap_count": len(self._taps),
            "features": self._weight,
            "features_added": self._added,
        }

    def carried(self, hidden: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        """float32 [n, d] of tokens' h_L [n, d] and what enters each tap [n, d]."""
        x = torch.cat([taps[layer] for layer in self._taps], dim=-1).float().contiguous()
        y = hidden.float().clone(memory_format=torch.contiguous_format)
        library.kernel().mr_linear(
            self._decoder.workspace.address,
            self._weight,
            abi.tensor(x),
            abi.NULL,
            0.0,
            len(x),
            abi.tensor(y),
            int(self._added),
        )
        return y
