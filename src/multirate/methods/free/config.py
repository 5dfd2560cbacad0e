"""FREE's configuration (arXiv 2310.05424), and what may be set when decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from multirate.methods.common.config import ExitWeights
from multirate.methods.common.exits import ExitsConfig
from multirate.methods.common.model_weights import DepthDecodeConfig
from multirate.methods.common.shape import BaseShape


@dataclass(frozen=True)
class FreeConfig(ExitsConfig):
    """One linear map before the base's head, at one shallow exit.

    exits: the layer after which a token may leave, a list of one. draft_vocab: size of a reduced
    head for the exit, the tokens that the training data's answers use most; null: the whole head.
    [ours] distillation: weight of the layer distillation beside the KL.
    """

    METHOD: ClassVar[str] = "free"

    distillation: float = 1.0

    def check(self) -> None:
        super().check()
        self.require(len(self.exits) == 1, "exits", "a list of one layer count")
        self.require(self.distillation >= 0, "distillation", "0 or more")

    @staticmethod
    def for_base(base: BaseShape, **options: Any) -> FreeConfig:
        """The exit after a third of the base's layers, the deepest of the paper's (8 of 24)."""
        values = {"exits": [max(1, round(base.num_layers / 3))]} | options
        config = FreeConfig.from_json(values)
        config.check_base(base)
        return config


@dataclass(frozen=True)
class FreeDecodeConfig(DepthDecodeConfig):
    """Settings.

    threshold: the least top-1 probability with which a token leaves, from 0 to 1; null: none does.
    adaptive: the paper's adaptive threshold: between texts it moves to where what the exit says is
    what the last layer says with at least this posterior probability, above 0 and below 1 (the
    paper: 0.4); `threshold` is the first one. null: it stays.
    kv: what later tokens read of the layers that a token skipped: deferred (the paper's: computed
    in parallel with the next token that goes deep) or propagate (from the residual it left with).
    weights: of a reduced head on the native kernel: int8 or bf16. [ours]
    """

    METHOD: ClassVar[str] = "free"

    threshold: float | None = 0.9
    adaptive: float | None = None
    kv: Literal["propagate", "deferred"] = "deferred"
    weights: ExitWeights = "int8"

    def check(self) -> None:
        super().check()
        self.require_share("threshold")
        self.require(
            self.adaptive is None or 0 < self.adaptive < 1,
            "adaptive",
            "null or a number above 0 and below 1",
        )
        self.require(
            self.adaptive is None or (self.threshold is not None and self.kv == "deferred"),
            "adaptive",
            "null, or set together with a threshold and kv=deferred",
        )
