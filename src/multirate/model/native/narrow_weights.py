"""The quantised copy of a model's weights: fewer bits, less to read, nearly the same tokens."""

from __future__ import annotations

import os
from dataclasses import dataclass

from multirate.errors import UserError
from multirate.model.native import abi
from multirate.model.native.packing import Owner

VARIABLE = "MULTIRATE_NARROW_BITS"


def least_bits() -> int:
    """The least bits of a copy's weights: 4 (used if the model's weights are 4-bit numbers), or 8
    for all models, as the environment's `VARIABLE` says. 8 shows on a model from a 4-bit file what
    other models get. Raises UserError.
    """
    bits = os.environ.get(VARIABLE, "4")
    if bits not in ("4", "8"):
        raise UserError(f"{VARIABLE} is '{bits}'; accepted: 4, 8")
    return int(bits)


@dataclass(frozen=True)
class NarrowWeights:
    """A model's layers and head in 8 bits (csrc/w8a8.c), or in 4 bits (csrc/w4a8.c) if they already
    are 4-bit numbers, for passes that need not be exact.
    """

    layers: abi.CData
    head: abi.CData
    told: abi.CData
    """The head when only its best tokens are needed: in 4 bits if they are rescored with `exact`
    (csrc/head.c).
    """
    exact: abi.CData | None
    """The model's own head, bf16 [vocab, hidden]; None: no rescoring."""
    owner: Owner  # keeps them alive

    def verifying(self, **fields: object) -> abi.CData:
        """The kernel's Narrow structure, for greedy tokens. fields: its other fields."""
        narrow = abi.new("Narrow", layers=self.layers, **fields)
        self.read_by(narrow, drawn=False)
        return narrow

    def read_by(self, narrow: abi.CData, drawn: bool) -> None:
        """Sets a Narrow's head. A drawn token can be any token, so all logits must be close to the
        head's own. Otherwise only the best tokens' logits must be, and these are rescored.
        """
        narrow.drawn = drawn
        narrow.head = self.head if drawn else self.told
        narrow.exact_head = abi.at(None if drawn else self.exact)
