"""Chooses the boldest threshold of dynamic mode that reaches a quality target on held-out
prompts.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def calibrate(
    decoder: Decoder,
    accelerator: Accelerator,
    prompts: Sequence[Sequence[int]],
    base: str,
    quality: float,
    confidence: float = 0.95,
    stop: StopSettings | None = None,
    data: Sequence[str] = ("the data",),
    batch: int = 8,
    progress: Progress | None = None,
    settings: Mapping[str, Any] | None = None,
    measured: dict[float, list[Measured]] | None = None,
    tries: int | None = None,
    points: Sequence[float] | None = None,
) -> Guarantee:
    """Answers the prompts at one threshold after another, from the most cautious to the boldest,
    and returns a Guarantee for the last that reaches the quality.

    prompts: token ids of prompts like those that the calibration is for, and not in the
        accelerator's training data.
    base: the fingerprint of the decoder's model.
    stop: stop settings of the answers.
    data: the files' names, for the record.
    settings: method settings to calibrate, replacing its defaults (exit_score, kv).
    measured: by threshold, answers to the first prompts from earlier calls with the same arguments
        (except quality and confidence). They are not decoded again; new answers are added.
    tries: how many thresholds of the method's path to try, spread evenly; None: all.
    points: thresholds to try instead of the path, the most cautious first.

    A threshold whose answers run into loops is not accepted, whatever its quality, because the full
    model would continue a loop as well. Raises UserError for an accelerator that cannot leave early
    and for too little data.
    """
    method = find(accelerator.method)
    mode = method.dynamic_mode()
    check_guarantee(quality, confidence, len(prompts), ", ".join(data))
    stop = stop or StopSettings()
    # looking ends where it is sure, which a sorted file must not make it too early
    prompts = random.Random(0).sample(list(prompts), len(prompts))
    measured = {} if measured is None else measured

    def settings_at(threshold: float | None) -> dict[str, Any]:
        return {**(settings or {}), **mode.settings(accelerator.module, threshold)}

    def losses(threshold: float) -> Iterator[float]:
        seen = measured.setdefault(threshold, [])
        yield from [one.loss for one in seen]
        first = len(seen)
        higher = [other for other in measured if other > threshold]
        before = measured[min(higher)][first:] if higher else []
        step = method.make_step(decoder, accelerator, settings_at(threshold))
        assert step is not None
        for one in answers(decoder, step, prompts[first:], stop, batch, threshold, before):
            seen.append(one)
            if progress is not None:
                progress(threshold, len(seen), len(prompts))
            yield one.loss

    path = mode.along(tries) if points is None else check_points(points)
    looped: list[float] = []

    def sound(threshold: float) -> bool:
        """Whether its answers loop no more than those of the most cautious threshold."""
        if _looping(measured[threshold]) > MOST_LOOPING + _looping(measured[path[0]]):
            looped.append(threshold)
        return not looped

    tested = risk.try_in_order(path, losses, len(prompts), 1 - quality, confidence, sound)
    held = [one for one in tested if one.holds]
    best = held[-1] if held else None
    seen = measured[best.threshold][: len(best.losses)] if best is not None else []
    chosen = settings_at(None if best is None else best.threshold)
    return Guarantee(
        quality=quality,
        confidence=confidence,
        gates=mode.gates(accelerator.module),
        # all of them: another version's defaults are not what was calibrated
        settings=method.read_settings(chosen).to_json(),
        base=base,
        accelerator=accelerator.weights_sha256,
        samples=len(prompts) if best is None else len(best.losses),
        max_new_tokens=stop.max_new_tokens or 0,
        tokens=sum(one.tokens for one in seen),
        differing=sum(one.differing for one in seen),
        loss=0.0 if best is None else best.mean,
        p_value=0.0 if best is None else best.p_value,
        leaves_early=best is not None,
        data=tuple(data),
        tried=tuple((one.threshold, one.mean) for one in tested),
        looped=bool(looped),
    )


def _looping(answered: Sequence[Measured]) -> float:
    """The share of the answers' tokens that are in loops."""
    return sum(one.looping for one in answered) / max(1, sum(one.tokens for one in answered))
