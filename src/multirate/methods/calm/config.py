"""Settings of CALM (arXiv 2207.07061), and the configuration of its classifiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from multirate.methods.common.config import ExitWeights
from multirate.methods.common.exits import ExitsConfig, spaced_exits
from multirate.methods.common.model_weights import DepthDecodeConfig
from multirate.methods.common.shape import BaseShape

Confidence = Literal["softmax", "state", "classifier"]


def default_exits(num_layers: int) -> tuple[int, ...]:
    """Four, spaced evenly over the upper third: below it a model that was not trained for exits is
    confidently wrong (lab/notes/dynamic-mode.md). [ours]
    """
    return spaced_exits(num_layers, 4, 2 / 3)


@dataclass(frozen=True)
class CalmDecodeConfig(DepthDecodeConfig):
    """Settings of both presets.

    threshold: λ, the least confidence with which a token leaves; null: none does.
    decay: the t-th new token of T needs 0.9 λ + 0.1 λ exp(−decay · t / T), as later errors are
    read by fewer tokens; 0: λ throughout.
    expected_tokens: T; 0: the most that the sequence may have.
    kv: what later tokens read of the layers that a token skipped: propagate (the paper: from the
    residual it left with) or deferred (exact, computed with the next token that goes as deep).
    weights: of a reduced head on the native kernel: int8 or bf16. [ours]
    """

    METHOD: ClassVar[str] = "calm"

    threshold: float | None = 0.9
    decay: float = 4.0
    expected_tokens: int = 0
    kv: Literal["propagate", "deferred"] = "propagate"
    weights: ExitWeights = "int8"

    def check(self) -> None:
        self.require(self.decay >= 0, "decay", "0 or more")
        self.require_count("expected_tokens", least=0)

    @property
    def score(self) -> Confidence:
        """The confidence that is compared with the threshold."""
        raise NotImplementedError


@dataclass(frozen=True)
class CalmConfig(CalmDecodeConfig):
    """Settings without training.

    confidence: softmax (top-1 minus top-2 probability) or state (cosine of the residuals at this
    exit and the one before; never leaves at the first).
    exits: layers after which a token may leave; none given: four, spaced evenly over the upper
    third. Every layer is allowed.
    draft_vocab: size of a reduced head for exits, the vocabulary's first ids; null: the whole head.
    [ours]
    """

    confidence: Literal["softmax", "state"] = "softmax"
    exits: tuple[int, ...] = ()
    draft_vocab: int | None = None

    def check(self) -> None:
        super().check()
        self.require_draft_vocab()

    @property
    def score(self) -> Confidence:
        return self.confidence


@dataclass(frozen=True)
class CalmClassifierDecodeConfig(CalmDecodeConfig):
    """Settings with trained classifiers, at the exits they were trained for.

    confidence: the classifier's, or one of those without training, over the accelerator's reduced
    head where it has one.
    """

    METHOD: ClassVar[str] = "calm-classifier"

    threshold: float | None = 0.5
    confidence: Confidence = "classifier"

    @property
    def score(self) -> Confidence:
        return self.confidence


@dataclass(frozen=True)
class CalmClassifierConfig(ExitsConfig):
    """One linear classifier at each exit, the base's head shared.

    exits: as CalmConfig's. draft_vocab: size of a reduced head for exits, the tokens that the
    training data's answers use most; null: the whole head. [ours]
    """

    METHOD: ClassVar[str] = "calm-classifier"

    @staticmethod
    def for_base(base: BaseShape, **options: Any) -> CalmClassifierConfig:
        """Four exits, spaced evenly over the base's upper third of layers."""
        values = {"exits": default_exits(base.num_layers)} | options
        config = CalmClassifierConfig.from_json(values)
        config.check_base(base)
        return config
