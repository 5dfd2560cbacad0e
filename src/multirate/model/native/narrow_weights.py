"""A narrow copy of a model's weights: fewer bits, a fraction of the memory read, nearly the same
tokens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from multirate.errors import UserError
from multirate.model.native import abi
from multirate.model.native.packing import Owner

VARIABLE = "MULTIRATE_NARROW_BITS"


def least_bits() -> int:
    """Bits of a copy's weights at least: 4, where a model's weights are such numbers, or 8 for all
    models, as the environment's `VARIABLE` says (to see on a model of a 4-bit file what others
    have). Raises UserError.
    """
    bits = os.environ.get(VARIABLE, "4")
    if bits not in ("4", "8"):
        raise UserError(f"{VARIABLE} is '{bits}'; accepted: 4, 8")
    return int(bits)


@dataclass(frozen=True)
class NarrowWeights:
    """A model's layers and head in 8 bits (csrc/w8a8.c), or in 4 (csrc/w4a8.c) where they are such
    numbers, for what need not be exact.
    """

    layers: abi.CData
    head: abi.CData
    told: abi.CData
    """The head where only its likeliest tokens are asked for: in 4 bits where `exact` has the last
    word on these (csrc/head.c).
    """
    exact: abi.CData | None
    """The model's own head, bf16 [vocab, hidden]; None: nothing has."""
    owner: Owner  # keeps them alive

    def verifying(self, **fields: object) -> abi.CData:
        """A Narrow of the kernel, for tokens that are the likeliest. fields: its other ones."""
        narrow = abi.new("Narrow", layers=self.layers, **fields)
        self.read_by(narrow, drawn=False)
        return narrow

    def read_by(self, narrow: abi.CData, drawn: bool) -> None:
        """Sets a Narrow's head. Drawn tokens may be any, so that all logits have to be near the
        head's own; else those of the likeliest, which it has the last word on.
        """
        narrow.drawn = drawn
        narrow.head = self.head if drawn else self.told
        narrow.exact_head = abi.at(None if drawn else self.exact)
