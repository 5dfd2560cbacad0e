"""A calibrated quality (Guarantee), and its file beside the accelerator."""

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
class Guarantee:
    """The result of a calibration: with probability `confidence` (over the calibration prompts),
    the share of an answer's tokens that differ from the full model's choice after the same text is
    at most 1 − quality, on average over prompts like those.
    """

    quality: float
    """The quality target, above 0 and at most 1."""
    confidence: float
    """Of the statement, between 0 and 1."""
    gates: tuple[int, ...]
    """The accelerator's gates."""
    settings: dict[str, Any]
    """The method settings that reach the quality."""
    base: str
    """Fingerprint of the base model's weights."""
    accelerator: str
    """Checksum of the accelerator's weights."""
    samples: int
    """Number of prompts answered."""
    max_new_tokens: int
    """Maximum length of the greedy answers."""
    tokens: int = 0
    """Tokens of all answers."""
    differing: int = 0
    """How many of them differ from the full model's choice."""
    loss: float = 0.0
    """Mean share of differing tokens per answer."""
    p_value: float = 0.0
    """Of the hypothesis that the expected loss is larger than 1 − quality."""
    leaves_early: bool = True
    """Whether any token leaves early."""
    data: tuple[str, ...] = ()
    """Names of the data files."""
    tried: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    """The thresholds tested, and the mean loss of each."""
    looped: bool = False
    """Whether the last threshold reached the quality but was not accepted because its answers run
    into loops.
    """

    def __post_init__(self) -> None:
        check_quality(self.quality)

    def sentence(self, other: str = "") -> str:
        """The measured agreement in one sentence. other: what the text is, such as "sampled text",
        if it is not greedy text of the bare model.
        """
        if not self.leaves_early:
            return (
                "measured agreement: no token leaves early, because no threshold that was tried "
                f"reaches a quality of {self.quality:g}; the text is the model's own"
            )
        guaranteed = (
            f"with {100 * self.confidence:g}% confidence, at most "
            f"{100 * (1 - self.quality):.3g}% of the tokens differ from what the full model "
            f"would choose after the same text (calibrated on {self.samples} greedy answers of "
            f"at most {self.max_new_tokens} tokens, in which {100 * self.loss:.2g}% differed)"
        )
        if other:
            return f"the calibration does not cover {other}; for greedy text: {guaranteed}"
        return f"measured agreement: {guaranteed}"


def check_quality(quality: object) -> float:
    """The quality as a number. Raises UserError unless it is in (0, 1]."""
    if not is_number(quality) or not 0 < quality <= 1:  # type: ignore[operator]
        raise UserError(
            f"quality is {reprlib.repr(quality)}; accepted: a number above 0 and at most 1, the "
            "share of tokens that must match the full model (1: lossless)"
        )
    return float(quality)  # type: ignore[arg-type]


def store(folder: Path, guarantee: Guarantee) -> Path:
    """Adds the guarantee to the folder's file and replaces an older one with the same quality and
    base. Raises UserError for a file that cannot be read or written.
    """
    kept = [
        old
        for old in read(folder)
        if (old.quality, old.base) != (guarantee.quality, guarantee.base)
    ]
    guarantees = sorted([*kept, guarantee], key=lambda one: -one.quality)
    write_json(folder / FILE, {"format": FORMAT, "guarantees": [asdict(one) for one in guarantees]})
    return folder / FILE


def read(folder: Path) -> list[Guarantee]:
    """The guarantees stored in an accelerator's folder; none without the file. The file may come
    from an untrusted source. Raises UserError naming the file and the field that cannot be used.
    """
    path = folder / FILE
    found = read_json(path)
    if not path.exists():
        return []
    if not isinstance(found, dict) or not isinstance(found.get("guarantees"), list):
        raise UserError(f"{path} has no list 'guarantees'; run multirate calibrate again")
    if found.get("format") != FORMAT:
        raise UserError(
            f"{path}: field 'format' is {reprlib.repr(found.get('format'))}; this version reads "
            f"{FORMAT}"
        )
    return [
        read_as(Guarantee, one, path, f"guarantees[{number}]")
        for number, one in enumerate(found["guarantees"])
    ]


def find(
    folder: Path | None,
    name: str,
    quality: float,
    base: str,
    accelerator: str,
    gates: tuple[int, ...],
) -> Guarantee:
    """The guarantee for this base, accelerator and gate set with the lowest quality that is at
    least the one asked for. Raises UserError with the reason if there is none.

    name: the accelerator's, for the message.
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
