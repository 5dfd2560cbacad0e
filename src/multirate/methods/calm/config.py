"""Settings of CALM (arXiv 2207.07061), and the configuration of its classifiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from multirate.methods.common.config import ExitWeights, MethodConfig
from multirate.methods.common.exits import ExitsConfig, spaced_exits
from multirate.methods.common.shape import BaseShape

Confidence = Literal["softmax", "state", "classifier"]


def default_exits(num_layers: int) -> tuple[int, ...]:
    """Four exits, evenly spaced over the upper third of the layers: below it a model that was not
    trained for exits is confidently wrong (lab/notes/dynamic-mode.md). [ours]
    """
    return spaced_exits(num_layers, 4, 2 / 3)


@dataclass(frozen=True)
class CalmDecodeConfig(MethodConfig):
    """Settings shared by calm and calm-classifier."""

    METHOD: ClassVar[str] = "calm"

    threshold: float | None = 0.9
    """λ, the minimum confidence with which a token leaves. Null: no token leaves."""
    decay: float = 4.0
    """The t-th of T new tokens needs 0.9 λ + 0.1 λ exp(−decay · t / T), because fewer tokens read a
    later error. 0: λ throughout.
    """
    expected_tokens: int = 0
    """T. 0: the maximum number of new tokens of the sequence."""
    kv: Literal["propagate", "deferred"] = "propagate"
    """What later tokens read for the layers that a token skipped. propagate (the paper): computed
    from the residual it left with. deferred: exact, computed with the next token that goes as deep.
    """
    weights: ExitWeights = "int8"
    """How the native kernel packs a reduced head: int8 or bf16. [ours]"""

    def check(self) -> None:
        super().check()
        self.require(self.decay >= 0, "decay", "0 or more")
        self.require_count("expected_tokens", least=0)

    @property
    def score(self) -> Confidence:
        """The confidence that is compared with the threshold."""
        raise NotImplementedError


@dataclass(frozen=True)
class CalmConfig(CalmDecodeConfig):
    """Settings of calm, which needs no training."""

    confidence: Literal["softmax", "state"] = "softmax"
    """softmax: top-1 minus top-2 probability. state: cosine of the residuals at this exit and the
    one before; no token leaves at the first exit.
    """
    exits: tuple[int, ...] = ()
    """Layers after which a token may leave. Empty: four, evenly spaced over the upper third."""
    draft_vocab: int | None = None
    """Size of a reduced head for exits, which covers the vocabulary's first ids. Null: the whole
    head. [ours]
    """

    def check(self) -> None:
        super().check()
        self.require_draft_vocab()

    @property
    def score(self) -> Confidence:
        return self.confidence


@dataclass(frozen=True)
class CalmClassifierDecodeConfig(CalmDecodeConfig):
    """Settings with trained classifiers, at the exits they were trained for."""

    METHOD: ClassVar[str] = "calm-classifier"

    threshold: float | None = 0.5
    """As in CalmDecodeConfig."""
    confidence: Confidence = "classifier"
    """classifier: the trained classifier's. softmax and state are CalmConfig's, over the
    accelerator's reduced head if it has one.
    """

    @property
    def score(self) -> Confidence:
        return self.confidence


@dataclass(frozen=True)
class CalmClassifierConfig(ExitsConfig):
    """One linear classifier at each exit. Exits share the base's head. `draft_vocab` counts the
    most frequent tokens of the training data's answers. [ours]
    """

    METHOD: ClassVar[str] = "calm-classifier"

    @staticmethod
    def for_base(base: BaseShape, **options: Any) -> CalmClassifierConfig:
        """Four exits, spaced evenly over the base's upper third of layers."""
        values = {"exits": default_exits(base.num_layers)} | options
        config = CalmClassifierConfig.from_json(values)
        config.check_base(base)
        return config
