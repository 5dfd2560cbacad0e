"""SpecEE's configuration (arXiv 2504.08850), and what may be set when decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from multirate.methods.common.config import ExitWeights
from multirate.methods.common.exits import ExitsConfig
from multirate.methods.common.model_weights import DepthDecodeConfig
from multirate.methods.common.shape import BaseShape


@dataclass(frozen=True)
class SpecEEConfig(ExitsConfig):
    """A proposer, and a predictor at each exit.

    exits: layers after which a token may leave, rising; which of them are looked at is decided
    while decoding. rank: width of the proposer's MLP. width: of a predictor. draft_vocab: size of a
    reduced head for proposals and exits, the tokens that the training data's answers use most;
    null: the whole head. [ours]
    """

    METHOD: ClassVar[str] = "specee"

    rank: int = 512
    width: int = 512

    def check(self) -> None:
        super().check()
        self.require_count("rank", "width")

    def check_base(self, base: BaseShape) -> None:
        """Refuse a config that does not fit ``base``."""
        super().check_base(base)
        self.require(self.draft_vocab is None or self.draft_vocab >= 4, "draft_vocab", "at least 4")

    @staticmethod
    def for_base(base: BaseShape, **options: Any) -> SpecEEConfig:
        """An exit after every layer from a quarter of the base's on (the paper: every layer)."""
        values = {"exits": list(range(max(1, base.num_layers // 4), base.num_layers))} | options
        config = SpecEEConfig.from_json(values)
        config.check_base(base)
        return config


@dataclass(frozen=True)
class SpecEEDecodeConfig(DepthDecodeConfig):
    """Settings.

    threshold: the least predicted probability with which the full head is asked whether a token
    leaves, from 0 to 1; null: none does.
    hot: how many exits are looked at for every token, those where the training data's tokens could
    leave first most often; beside them the two on either side of each of the last five exits.
    kv: what later tokens read of the layers that a token skipped: propagate (from the residual it
    left with) or deferred (exact, computed with the next token that goes as deep). [ours: the
    paper's code leaves holes]
    weights: of a reduced head on the native kernel: int8 or bf16. [ours]
    """

    METHOD: ClassVar[str] = "specee"

    threshold: float | None = 0.5
    hot: int = 4
    kv: Literal["propagate", "deferred"] = "propagate"
    weights: ExitWeights = "int8"

    def check(self) -> None:
        self.require_share("threshold")
        self.require_count("hot", least=0)
