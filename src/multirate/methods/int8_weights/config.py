"""Settings of plain decoding with weights in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.methods.common.config import MethodConfig, PromptWeights


@dataclass(frozen=True)
class Int8WeightsConfig(MethodConfig):
    """Settings.

    margin: a token whose two likeliest candidates' logits are less than this apart is decided by
    the model's own weights; 0: none is.
    prompt_weights: what reads prompts: own, or narrow, the copy, which takes less time and changes
    some tokens. [ours]
    """

    METHOD: ClassVar[str] = "int8_weights"

    margin: float = 0.0
    prompt_weights: PromptWeights = "own"

    def check(self) -> None:
        self.require(self.margin >= 0, "margin", "0 or above (logits)")
