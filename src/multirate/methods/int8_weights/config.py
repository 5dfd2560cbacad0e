"""Settings of plain decoding with 8-bit weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.methods.common.config import MethodConfig, PromptWeights


@dataclass(frozen=True)
class Int8WeightsConfig(MethodConfig):
    """Decoding settings."""

    METHOD: ClassVar[str] = "int8_weights"

    margin: float = 0.0
    """The full-precision weights decide a token if the logits of its two likeliest candidates
    differ by less than this. 0: never.
    """
    prompt_weights: PromptWeights = "own"
    """Which weights read the prompt. narrow, the 8-bit copy, is faster and changes some tokens.
    [ours]
    """

    def check(self) -> None:
        self.require(self.margin >= 0, "margin", "0 or above (logits)")
