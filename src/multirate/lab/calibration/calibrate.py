"""Chooses the boldest threshold of dynamic mode that reaches a quality target on held-out
prompts.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.guarantee import Guarantee, check_quality
from multirate.lab.calibration import risk
from multirate.lab.calibration.measure import Measured, answers
from multirate.lab.calibration.repetition import MOST_LOOPING
from multirate.methods.spec import find
from multirate.runtime.decoder import Decoder
from multirate.training.checkpoint import Accelerator

Progress = Callable[[float, int, int], None]
"""progress(threshold under test, prompts answered, prompts in all)."""


def check_guarantee(quality: float, confidence: float, samples: int, where: str) -> None:
    """Raises UserError for a quality or confidence that calibration cannot establish, or not with
    so few samples. where: the data's name.
    """
    check_quality(quality)
    if quality == 1:
        raise UserError("quality 1 is lossless and needs no calibration; give a quality below 1")
    if isinstance(confidence, bool) or not 0 < confidence < 1:
        raise UserError(f"confidence is {confidence!r}; accepted: a number between 0 and 1")
    needed = risk.samples_needed(1 - quality, confidence)
    if samples < needed:
        raise UserError(
            f"{where} has {samples} different prompts; a quality of {quality:g} with confidence "
            f"{confidence:g} needs at least {needed}, and more where tokens differ from the full "
            "model's"
        )


def check_points(points: Sequence[float]) -> tuple[float, ...]:
    """Points of a dial to try. Raises UserError unless they decrease, the most cautious first."""
    falling = all(one > other for one, other in itertools.pairwise(points))
    if not points or not falling or not all(map(math.isfinite, points)):
        raise UserError(
            f"points are {', '.join(f'{one:g}' for one in points) or 'none'}; accepted: "
            "decreasing numbers, the most cautious first"
        )
    return tuple(points)


@dataclass
class Calibration:
    """Answers prompts at one threshold after another, from the most cautious to the boldest, and
    keeps what it measures for further qualities.
    """

    decoder: Decoder
    accelerator: Accelerator
    prompts: Sequence[Sequence[int]]
    """Token ids of prompts like those that the calibration is for, and not in the accelerator's
    training data.
    """
    base: str
    """The fingerprint of the decoder's model."""
    stop: StopSettings = field(default_factory=StopSettings)
    """Of the answers."""
    data: Sequence[str] = ("the data",)
    """The files' names, for the record."""
    batch: int = 8
    progress: Progress | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Method settings to calibrate, replacing its defaults (exit_score, kv)."""
    path: Sequence[float] | None = None
    """Thresholds to try, the most cautious first; None: all of the method's."""

    def __post_init__(self) -> None:
        self._method = find(self.accelerator.method)
        self._mode = self._method.dynamic_mode()
        self._path = self._mode.path if self.path is None else check_points(self.path)
        # looking ends where it is sure, which a sorted file must not make it too early
        self._drawn = random.Random(0).sample(list(self.prompts), len(self.prompts))
        self._measured: dict[float, list[Measured]] = {}
        """By threshold, of the first of these prompts."""

    def reach(self, quality: float, confidence: float = 0.95) -> Guarantee:
        """A Guarantee for the boldest threshold that reaches the quality.

        A threshold whose answers run into loops is not accepted, whatever its quality, because the
        full model would continue a loop as well. Raises UserError for an accelerator that cannot
        leave early and for too little data.
        """
        check_guarantee(quality, confidence, len(self.prompts), ", ".join(self.data))
        looped: list[float] = []

        def sound(threshold: float) -> bool:
            """Whether its answers loop no more than those of the most cautious threshold."""
            most = MOST_LOOPING + _looping(self._measured[self._path[0]])
            if _looping(self._measured[threshold]) > most:
                looped.append(threshold)
            return not looped

        tested = risk.try_in_order(
            self._path, self._losses, len(self.prompts), 1 - quality, confidence, sound
        )
        best = next((one for one in reversed(tested) if one.holds), None)
        seen = [] if best is None else self._measured[best.threshold][: len(best.losses)]
        chosen = self._settings_at(None if best is None else best.threshold)
        return Guarantee(
            quality=quality,
            confidence=confidence,
            gates=self._mode.gates(self.accelerator.module),
            # all of them: another version's defaults are not what was calibrated
            settings=self._method.read_settings(chosen).to_json(),
            base=self.base,
            accelerator=self.accelerator.weights_sha256,
            samples=len(self.prompts) if best is None else len(best.losses),
            max_new_tokens=self.stop.max_new_tokens or 0,
            tokens=sum(one.tokens for one in seen),
            differing=sum(one.differing for one in seen),
            loss=0.0 if best is None else best.mean,
            p_value=0.0 if best is None else best.p_value,
            leaves_early=best is not None,
            data=tuple(self.data),
            tried=tuple((one.threshold, one.mean) for one in tested),
            looped=bool(looped),
        )

    def _settings_at(self, threshold: float | None) -> dict[str, Any]:
        return {**self.settings, **self._mode.settings(self.accelerator.module, threshold)}

    def _losses(self, threshold: float) -> Iterator[float]:
        """Of the prompts in turn. Answers that are measured already are not decoded again."""
        seen = self._measured.setdefault(threshold, [])
        yield from [one.loss for one in seen]
        first = len(seen)
        higher = [other for other in self._measured if other > threshold]
        before = self._measured[min(higher)][first:] if higher else []
        settings = self._settings_at(threshold)
        step = self._method.make_step(self.decoder, self.accelerator, settings)
        assert step is not None
        rest = self._drawn[first:]
        for one in answers(self.decoder, step, rest, self.stop, self.batch, threshold, before):
            seen.append(one)
            if self.progress is not None:
                self.progress(threshold, len(seen), len(self.prompts))
            yield one.loss


def _looping(answered: Sequence[Measured]) -> float:
    """The share of the answers' tokens that are in loops."""
    return sum(one.looping for one in answered) / max(1, sum(one.tokens for one in answered))
