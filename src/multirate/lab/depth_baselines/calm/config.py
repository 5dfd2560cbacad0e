"""Settings of CALM (arXiv 2207.07061), and the configuration of its classifiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from multirate.lab.depth_baselines._shared.exits import ExitsConfig, spaced_exits
from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.shape import BaseShape


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
    """The t-th of T new tokens, the most allowed, needs 0.9 λ + 0.1 λ exp(−decay · t / T), because
    fewer tokens read a later error. 0: λ throughout.
    """

    def check(self) -> None:
        super().check()
        self.require(self.decay >= 0, "decay", "0 or more")


@dataclass(frozen=True)
class CalmConfig(CalmDecodeConfig):
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


@dataclass(frozen=True)
class CalmClassifierDecodeConfig(CalmDecodeConfig):
    """Settings with trained classifiers, at the exits they were trained for."""

    METHOD: ClassVar[str] = "calm-classifier"

    threshold: float | None = 0.5


@dataclass(frozen=True)
class CalmClassifierConfig(ExitsConfig):
    """One linear classifier at each exit. Exits share the base's head. `draft_vocab` counts the
    most frequent tokens of the training data's answers. [ours]
    """

    METHOD: ClassVar[str] = "calm-classifier"
    FROM_BASE: ClassVar[dict[str, str]] = {"exits": "four in the upper third"}

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        """Four exits, spaced evenly over the base's upper third of layers."""
        return {"exits": default_exits(base.num_layers)}
