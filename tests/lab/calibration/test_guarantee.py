"""Guarantees are kept beside the accelerator, and found again only for what they were made for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from multirate.errors import UserError
from multirate.guarantee import FILE, Guarantee, check_quality, find, read, store

GUARANTEE = Guarantee(
    quality=0.99,
    confidence=0.95,
    gates=(1,),
    settings={"exit_thresholds": [0.8]},
    base="b" * 32,
    accelerator="a" * 64,
    samples=400,
    max_new_tokens=128,
    tokens=40000,
    differing=160,
    loss=0.004,
    p_value=0.01,
    data=("own.jsonl",),
    tried=((0.9, 0.001), (0.8, 0.004), (0.7, 0.02)),
)


def other(**changes: Any) -> Guarantee:
    return dataclasses.replace(GUARANTEE, **changes)


def found(folder: Path | None, quality: float = 0.99, **changes: Any) -> Guarantee:
    wanted = {"base": "b" * 32, "accelerator": "a" * 64, "gates": (1,), **changes}
    return find(folder, "mine", quality, **wanted)


def test_what_is_stored_is_read(tmp_path: Path) -> None:
    assert read(tmp_path) == []
    assert store(tmp_path, GUARANTEE) == tmp_path / FILE
    assert read(tmp_path) == [GUARANTEE]
    bold, again = other(quality=0.9, loss=0.05), other(loss=0.002)
    store(tmp_path, bold)
    store(tmp_path, again)
    assert read(tmp_path) == [again, bold], "one for each quality, the newest"
    store(tmp_path, other(base="c" * 32))
    assert len(read(tmp_path)) == 3, "another base's stays"


def test_the_least_quality_that_is_enough_is_used(tmp_path: Path) -> None:
    bold = other(quality=0.9)
    store(tmp_path, GUARANTEE)
    store(tmp_path, bold)
    assert found(tmp_path, 0.99) == found(tmp_path, 0.95) == GUARANTEE
    assert found(tmp_path, 0.9) == found(tmp_path, 0.5) == bold
    with pytest.raises(
        UserError, match=r"reaches a quality of 0\.995 \(stored: 0\.99, 0\.9\); run"
    ):
        found(tmp_path, 0.995)


def test_a_guarantee_made_for_something_else_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, None):
        with pytest.raises(
            UserError, match=r"no calibration is stored .* run `multirate calibrate"
        ):
            found(folder)
    store(tmp_path, GUARANTEE)
    for changes, reason in (
        ({"base": "x"}, "made for another base model"),
        ({"gates": (2,)}, r"another set of gates \(\[1\]; this accelerator has \[2\]\)"),
        ({"accelerator": "x"}, "other weights of the accelerator"),
    ):
        with pytest.raises(UserError, match=reason):
            found(tmp_path, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("quality", [0, -0.5, 1.01, float("nan"), float("inf"), True, "0.9", None])
def test_a_quality_is_above_0_and_at_most_1(quality: object) -> None:
    with pytest.raises(UserError, match="accepted: a number above 0 and at most 1"):
        check_quality(quality)
    assert check_quality(1) == 1.0


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    store(tmp_path, GUARANTEE)
    good = json.loads((tmp_path / FILE).read_text())

    def refused(content: object, *parts: str) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / FILE).write_text(text)
        with pytest.raises(UserError) as error:
            read(tmp_path)
        for part in (FILE, *parts):
            assert part in str(error.value)

    refused("{", "not valid JSON")
    refused([], "guarantees")
    refused({**good, "format": 9}, "'format' is 9")
    refused({**good, "guarantees": [3]}, "guarantees[0]")
    for name, wrong in (
        ("quality", "high"),
        ("quality", 2),
        ("tried", [3]),
        ("gates", 1),
        ("settings", []),
        ("samples", True),
        ("leaves_early", 1),
        ("base", None),
    ):
        one = {**good["guarantees"][0], name: wrong}
        refused({**good, "guarantees": [one]}, "guarantees[0]")
    (tmp_path / FILE).write_text(" " * (1 << 21))
    with pytest.raises(UserError, match="bytes, the maximum"):
        read(tmp_path)


def test_the_sentence_says_what_is_guaranteed_and_of_what() -> None:
    said = GUARANTEE.sentence()
    for part in ("at most 1% of the tokens", "95% confidence", "400", "128", "0.4%"):
        assert part in said
    assert GUARANTEE.sentence("sampled text").startswith(
        "the calibration does not cover sampled text"
    )
    assert "no token leaves early" in other(leaves_early=False).sentence()
