"""A promise and the file it is kept in, beside the accelerator that it was made for."""

from __future__ import annotations

import reprlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from multirate.errors import UserError
from multirate.io import read_json, write_json
from multirate.json_values import is_number, read_as

FILE = "calibration.json"
FORMAT = 1


@dataclass(frozen=True)
class Promise:
    """With probability `confidence` (over the prompts it was made on), at most a share 1 − quality
    of the tokens of an answer is, on average over prompts like those, another than the full model's
    after the same text.

    gates, settings: of the accelerator, and of the method that keeps the promise. base,
    accelerator: the fingerprint of the base's weights, and the checksum of the accelerator's.
    samples: prompts answered for it; tokens, differing: of their answers, greedy and of at most
    `max_new_tokens`; loss: their mean share of differing tokens; p_value: of a larger risk than
    promised. tried: the thresholds tested, and the mean loss of each. looped: the last of them
    keeps the quality, and was not promised because its answers run into loops.
    """

    quality: float
    confidence: float
    gates: tuple[int, ...]
    settings: dict[str, Any]
    base: str
    accelerator: str
    samples: int
    max_new_tokens: int
    tokens: int = 0
    differing: int = 0
    loss: float = 0.0
    p_value: float = 0.0
    leaves_early: bool = True
    data: tuple[str, ...] = ()
    tried: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    looped: bool = False

    def __post_init__(self) -> None:
        check_quality(self.quality)

    def sentence(self, other: str = "") -> str:
        """What is promised, for the user. other: what the text is, such as "sampled text", where it
        is not greedy text of the bare model.
        """
        if not self.leaves_early:
            return (
                "measured agreement: no token leaves early, because no threshold that was tried "
                f"reaches a quality of {self.quality:g}; the text is the model's own"
            )
        promised = (
            f"with {100 * self.confidence:g}% confidence, at most "
            f"{100 * (1 - self.quality):.3g}% of the tokens differ from what the full model "
            f"would choose after the same text (calibrated on {self.samples} greedy answers of "
            f"at most {self.max_new_tokens} tokens, in which {100 * self.loss:.2g}% differed)"
        )
        if other:
            return f"the calibration does not cover {other}; for greedy text: {promised}"
        return f"measured agreement: {promised}"


def check_quality(quality: object) -> float:
    """The quality as a number. UserError unless it is in (0, 1]."""
    if not is_number(quality) or not 0 < quality <= 1:  # type: ignore[operator]
        raise UserError(
            f"quality is {reprlib.repr(quality)}; accepted: a number above 0 and at most 1, the "
            "share of tokens that must match the full model (1: lossless)"
        )
    return float(quality)  # type: ignore[arg-type]


def store(folder: Path, promise: Promise) -> Path:
    """Adds the promise to the folder's file, in place of an older one of its quality and base.
    Raises UserError for a file that cannot be read or written.
    """
    kept = [
        old for old in read(folder) if (old.quality, old.base) != (promise.quality, promise.base)
    ]
    promises = sorted([*kept, promise], key=lambda one: -one.quality)
    write_json(folder / FILE, {"format": FORMAT, "promises": [asdict(one) for one in promises]})
    return folder / FILE


def read(folder: Path) -> list[Promise]:
    """The promises kept in an accelerator's folder; none without the file. Raises UserError naming
    the file and the field that cannot be used: it may come from anywhere.
    """
    path = folder / FILE
    found = read_json(path)
    if not path.exists():
        return []
    if not isinstance(found, dict) or not isinstance(found.get("promises"), list):
        raise UserError(f"{path} has no list 'promises'; run multirate calibrate again")
    if found.get("format") != FORMAT:
        raise UserError(
            f"{path}: field 'format' is {reprlib.repr(found.get('format'))}; this version reads "
            f"{FORMAT}"
        )
    return [
        read_as(Promise, one, path, f"promises[{number}]")
        for number, one in enumerate(found["promises"])
    ]


def find(
    folder: Path | None,
    name: str,
    quality: float,
    base: str,
    accelerator: str,
    gates: tuple[int, ...],
) -> Promise:
    """The promise of the least quality that is at least the one asked for, of those made for this
    base, accelerator and gate set. Raises UserError saying why there is none.

    name: of the accelerator, for the message.
    """
    stored = [] if folder is None else read(folder)
    how = (
        f"multirate calibrate MODEL --accelerator {folder or name} --data FILE "
        f"--quality {quality:g}"
    )
    if not stored:
        raise UserError(f"no calibration is stored with the accelerator {name}; run `{how}`")
    place = folder / FILE if folder is not None else FILE
    reasons = {
        "another base model": lambda one: one.base == base,
        f"another set of gates ({list(stored[0].gates)}; this accelerator has {list(gates)})": (
            lambda one: one.gates == gates
        ),
        "other weights of the accelerator": lambda one: one.accelerator == accelerator,
    }
    fitting = stored
    for reason, fits in reasons.items():
        fitting = [one for one in fitting if fits(one)]
        if not fitting:
            raise UserError(f"the calibration in {place} was made for {reason}; run `{how}`")
    enough = [one for one in fitting if one.quality >= quality]
    if not enough:
        known = ", ".join(f"{one.quality:g}" for one in fitting)
        raise UserError(
            f"no calibration in {place} reaches a quality of {quality:g} (stored: {known}); run "
            f"`{how}`"
        )
    return min(enough, key=lambda one: one.quality)
