"""LITE's configuration (arXiv 2310.18581), and what may be set when decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from multirate.methods.common.config import ExitWeights
from multirate.methods.common.exits import ExitsConfig, spaced_exits
from multirate.methods.common.model_weights import DepthDecodeConfig
from multirate.methods.common.shape import BaseShape

PAPER_THRESHOLDS = (0.95, 0.95, 0.9, 0.9, 0.8, 0.7)
"""Of a 7B model's exits after 8, 12, 16, 20, 24 and 28 of 32 layers."""


def default_thresholds(count: int) -> tuple[float, ...]:
    """The paper's, for another number of exits on the line through them."""
    places = np.linspace(0, len(PAPER_THRESHOLDS) - 1, count)
    values = np.interp(places, range(len(PAPER_THRESHOLDS)), PAPER_THRESHOLDS)
    return tuple(round(float(value), 4) for value in values)


@dataclass(frozen=True)
class LiteConfig(ExitsConfig):
    """One linear map before the base's head at each exit.

    exits: layers after which a token may leave, rising. thresholds: for each the least top-1
    probability with which it does. draft_vocab: size of a reduced head for exits, the tokens that
    the training data's answers use most; null: the whole head. [ours]
    """

    METHOD: ClassVar[str] = "lite"

    thresholds: tuple[float, ...] = ()

    def check(self) -> None:
        super().check()
        self.require(
            len(self.thresholds) == len(self.exits)
            and all(0 <= threshold <= 1 for threshold in self.thresholds),
            "thresholds",
            "a number from 0 to 1 for each exit",
        )

    @staticmethod
    def for_base(base: BaseShape, **options: Any) -> LiteConfig:
        """Six exits from a quarter of the base's layers on, an eighth apart, as in the paper."""
        values: dict[str, Any] = {"exits": spaced_exits(base.num_layers, 6, 1 / 4)} | options
        exits = values["exits"]
        count = len(exits) if isinstance(exits, (list, tuple)) else 1
        config = LiteConfig.from_json({"thresholds": default_thresholds(count)} | values)
        config.check_base(base)
        return config


@dataclass(frozen=True)
class LiteDecodeConfig(DepthDecodeConfig):
    """Settings.

    thresholds: one for each exit, null for never; null instead of the list: the accelerator's.
    kv: what later tokens read of the layers that a token skipped: propagate (from the residual it
    left with) or deferred (exact, computed with the next token that goes as deep).
    weights: of a reduced head on the native kernel: int8 or bf16. [ours]
    """

    METHOD: ClassVar[str] = "lite"

    thresholds: tuple[float | None, ...] | None = None
    kv: Literal["propagate", "deferred"] = "propagate"
    weights: ExitWeights = "int8"
