"""The formats of packed weights: the kernel's table (csrc/weights/format.h), one object each."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from multirate.runtime.native import abi, library

COLUMN = 16  # outputs that are packed together


@dataclass(frozen=True)
class WeightFormat:
    """One format. name: as in csrc/include/model.h; number: its WEIGHTS_… constant."""

    name: str
    number: int

    def _sizes(self, inputs: int) -> abi.CData:
        return library.kernel().mr_format_sizes(self.number, inputs)

    @property
    def piece(self) -> int:
        """What a layer's inputs are a multiple of."""
        return int(self._sizes(0).piece)

    @property
    def quantised(self) -> bool:
        """Whether GGUF files have blocks of it, which are multiplied with rows of 8 bits."""
        return self in QUANTISED

    def weight_bytes(self, outputs: int, inputs: int) -> int:
        """What so many packed outputs take, a multiple of 16, without their scales."""
        return outputs // COLUMN * int(self._sizes(inputs).column)

    def scale_bytes(self, outputs: int, inputs: int) -> int:
        """What their scales take."""
        return outputs // COLUMN * int(self._sizes(inputs).scales)

    def row_bytes(self, inputs: int) -> int:
        """What an output's blocks take in a GGUF file."""
        return int(self._sizes(inputs).row)


@functools.cache
def _format(name: str) -> WeightFormat:
    return WeightFormat(name, abi.constant(f"WEIGHTS_{name}"))


BF16, INT16, INT12 = _format("BF16"), _format("INT16"), _format("INT12")
Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 = (_format(name) for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"))
Q4_K, Q5_K, Q6_K = (_format(name) for name in ("Q4_K", "Q5_K", "Q6_K"))
QUANTISED = (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K)
"""Those that GGUF files have, by GGUF's names."""
QUANTISABLE = (Q8_0, Q4_0, Q4_1)
"""Those that the kernel makes from floats."""


def format_named(name: str) -> WeightFormat | None:
    """The quantised format that GGUF calls `name`; None: the kernel has none."""
    return next((one for one in QUANTISED if one.name == name.upper()), None)


def draft_format(weights: str) -> WeightFormat:
    """The format of layers and heads that only draft. weights: "int4", "int8", or "bf16" for 16
    bits. Processors without fast byte products have 16 bits for all.
    """
    if weights == "bf16" or instruction_set() == "generic":
        return INT16
    return Q4_1 if weights == "int4" else Q8_0


def mixing_format(weights: str) -> WeightFormat:
    """The same of the small products by which a draft's residuals are mixed: 8 bits at least, as 4
    cost them more than they save (lab/notes/weight-formats.md).
    """
    return draft_format("int8" if weights == "int4" else weights)


def screened() -> bool:
    """Whether heads of 16 bits have a `Screen` on this processor."""
    return instruction_set() in ("amx", "avx512_vnni")


def instruction_set() -> str:
    """The one in use, such as "avx512_vnni"."""
    return str(abi.ffi.string(library.kernel().mr_arch()).decode())
