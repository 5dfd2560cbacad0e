"""How an evaluation decodes: with the full model, with drafts that it verifies, or with tokens that
leave early.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from multirate.engine import Engine
from multirate.errors import UserError
from multirate.guarantee import check_quality
from multirate.methods.spec import PLAIN, find, write_variant

FULL, SPECULATIVE, DYNAMIC = MODES = ("full", "speculative", "dynamic")


@dataclass(frozen=True)
class Mode:
    """name: one of MODES. quality or threshold: of dynamic mode, one of the two. Raises UserError
    for what does not go together.
    """

    name: str = FULL
    quality: float | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.name not in MODES:
            raise UserError(f"mode is {self.name!r}; accepted: {', '.join(MODES)}")
        given = [
            f"{name} {value!r}"
            for name, value in (("quality", self.quality), ("threshold", self.threshold))
            if value is not None
        ]
        if self.name != DYNAMIC and given:
            raise UserError(f"{given[0]} needs mode 'dynamic', not {self.name!r}")
        if self.name == DYNAMIC and len(given) != 1:
            raise UserError(
                "mode 'dynamic' needs either a quality or a threshold; given: "
                f"{' and '.join(given) or 'neither'}"
            )
        if self.quality is not None:
            check_quality(self.quality)
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise UserError(f"threshold is {self.threshold!r}; accepted: a finite number")


@dataclass(frozen=True)
class Decoding:
    """A mode on an engine. method: its name, with settings. arguments: `Engine.generate`'s.
    lossless: whether the text is the full model's own.
    """

    mode: Mode
    method: str
    lossless: bool
    arguments: dict[str, Any] = field(default_factory=dict)


def decoding(engine: Engine, mode: Mode, speculate: str = "auto") -> Decoding:
    """How the engine decodes in a mode, with its default accelerator. Raises UserError where it has
    none that can, and for a quality that is not calibrated.
    """
    if mode.name == FULL:
        return Decoding(mode, PLAIN, True, {"method": PLAIN})
    name = engine.default
    if name not in engine.accelerators:
        raise UserError(f"mode {mode.name!r} needs an accelerator; name one with --accelerator")
    if mode.name == DYNAMIC:
        accelerator = engine.accelerators[name]
        dial = find(accelerator.method).dynamic_mode()
        settings: dict[str, Any]
        if mode.threshold is None:
            settings = {"quality": mode.quality}
        else:
            settings = dial.settings(accelerator.module, mode.threshold)
        name = write_variant(name, settings)
        engine.guarantee_of(name)  # a quality that is not calibrated is said before data is read
    arguments = {"method": name, "speculate": speculate}
    return Decoding(mode, name, engine.lossless(name), arguments)
