"""DEED's configuration (arXiv 2311.08623), and what may be set when decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from multirate.methods.common.config import ExitWeights
from multirate.methods.common.exits import ExitsConfig, spaced_exits
from multirate.methods.common.model_weights import DepthDecodeConfig
from multirate.methods.common.shape import BaseShape


@dataclass(frozen=True)
class DeedConfig(ExitsConfig):
    """An adapter before the base's head at each exit.

    exits: layers after which a token may leave, rising. rank: width of an adapter. draft_vocab:
    size of a reduced head for exits, the tokens that the training data's answers use most; null:
    the whole head. [ours]
    """

    METHOD: ClassVar[str] = "deed"

    rank: int = 128

    @staticmethod
    def for_base(base: BaseShape, **options: Any) -> DeedConfig:
        """Six exits from a quarter of the base's layers on, as lite's (the paper: every layer)."""
        values = {"exits": spaced_exits(base.num_layers, 6, 1 / 4)} | options
        config = DeedConfig.from_json(values)
        config.check_base(base)
        return config


@dataclass(frozen=True)
class DeedDecodeConfig(DepthDecodeConfig):
    """Settings.

    threshold: the least top-1 probability with which a token leaves; null: none does.
    kv: what later tokens read of the layers that a token skipped: deferred (the paper's features
    just in time: computed with the next token that goes as deep) or propagate (from the residual it
    left with).
    weights: of a reduced head on the native kernel: int8 or bf16. [ours]
    """

    METHOD: ClassVar[str] = "deed"

    threshold: float | None = 0.9
    kv: Literal["propagate", "deferred"] = "deferred"
    weights: ExitWeights = "int8"
