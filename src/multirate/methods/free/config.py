"""FREE's configuration (arXiv 2310.05424), and decoding settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from multirate.methods.common.config import ExitWeights, MethodConfig
from multirate.methods.common.exits import ExitsConfig
from multirate.methods.common.shape import BaseShape


@dataclass(frozen=True)
class FreeConfig(ExitsConfig):
    """One linear map before the base's head, at one shallow exit; `exits` is a list of one layer.
    Also see ExitsConfig.
    """

    METHOD: ClassVar[str] = "free"

    distillation: float = 1.0
    """Loss weight of layer distillation, beside the KL divergence."""

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
class FreeDecodeConfig(MethodConfig):
    """Decoding settings."""

    METHOD: ClassVar[str] = "free"

    threshold: float | None = 0.9
    """Minimum top-1 probability with which a token leaves, from 0 to 1. Null: no token leaves."""
    adaptive: float | None = None
    """The paper's adaptive threshold, above 0 and below 1 (the paper: 0.4). Between texts the
    threshold, which starts at `threshold`, moves to where exit and last layer agree with at least
    this posterior probability. Null: it stays.
    """
    kv: Literal["propagate", "deferred"] = "deferred"
    """What later tokens read for the layers that a token skipped. deferred (the paper): computed in
    parallel with the next token that goes deep. propagate: computed from the residual it left with.
    """
    weights: ExitWeights = "int8"
    """How the native kernel packs a reduced head: int8 or bf16. [ours]"""

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
