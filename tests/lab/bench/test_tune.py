"""`tune` finds the fastest of simulated settings, within its time, and never by a benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multirate.decoding.results import DecodeStats
from multirate.errors import UserError
from multirate.lab.bench.tune import Tried, candidates, tune, tuning_prompts
from multirate.methods.spec import PLAIN, all_specs, find, parse_variant

from . import tiny_model

SPEED = {1: 90.0, 2: 130.0, 3: 120.0, 4: 60.0, 5: 100.0}  # tokens a second by the setting


class Machine:
    """Answers take as long as SPEED says; what was run is noted."""

    def __init__(self) -> None:
        self.now, self.ran = 0.0, []

    def run(self, name: str, prompt: list[int], most: int | None) -> DecodeStats:
        value = parse_variant(name)[1].get("tokens", 1)
        seconds = 10 / (80.0 if name == PLAIN else SPEED[value])
        self.now += seconds
        self.ran.append((name, prompt[0]))
        return DecodeStats(tokens=10, sequence_steps=5, seconds=seconds)


def test_the_fastest_wins_and_losers_are_not_measured_on() -> None:
    machine, dropped = Machine(), []
    choices = [{}, *({"tokens": n} for n in range(2, 6))]
    best, (plain, other), tried = tune(
        machine.run,
        "sam",
        choices,
        [[1], [2], [3]],
        60.0,
        clock=lambda: machine.now,
        drop=dropped.append,
        beside=["token_recycling"],
    )
    assert best.settings == {"tokens": 2} and best is tried[0]
    assert other.prompts == plain.prompts == best.prompts and other.speed == pytest.approx(90)
    assert plain.speed == pytest.approx(80)
    assert machine.now < 75
    by_name = {one.name: one for one in tried}
    assert by_name["sam:tokens=4"].prompts < best.prompts == by_name["sam"].prompts
    assert "sam:tokens=4" in dropped and "sam" not in dropped
    assert best.figures(plain)["speedup"] == pytest.approx(1.625)


def test_a_speedup_is_over_the_prompts_of_both() -> None:
    def seen(*seconds: float) -> list[DecodeStats]:
        return [DecodeStats(tokens=10, sequence_steps=5, seconds=s) for s in seconds]

    plain, early = Tried(PLAIN, {}, seen(1.0, 4.0, 4.0)), Tried("sam:tokens=4", {}, seen(0.5))
    figures = early.figures(plain)
    assert figures["speedup"] == pytest.approx(2.0) and figures["prompts"] == 1
    assert plain.speed == pytest.approx(10 / 3) and figures["tokens_per_step"] == 2.0


def test_the_defaults_stay_where_nothing_is_faster() -> None:
    machine = Machine()
    best, _, _ = tune(
        machine.run, "sam", [{}, {"tokens": 4}], [[1]], 5.0, clock=lambda: machine.now
    )
    assert best.settings == {}


def test_every_candidate_is_a_setting_of_its_method() -> None:
    for known in all_specs().values():
        for chosen in candidates(known) if known.tunable else ():
            known.read_settings(chosen)
    assert candidates(find("prompt_lookup"))[0] == {}
    with pytest.raises(UserError, match="autoregressive"):
        candidates(find("autoregressive"))


@pytest.mark.parametrize(
    "record",
    [{"question_id": 1, "turns": ["Why?"]}, {"question": "1+1?", "answer": "2 #### 2"}],
)
def test_a_benchmark_is_refused(tmp_path: Path, record: dict[str, object]) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(UserError, match="benchmark"):
        tuning_prompts(tiny_model.tokenizer(), path)
    path.write_text("\ufeff" + path.read_text())  # as some editors save it
    with pytest.raises(UserError, match="benchmark"):
        tuning_prompts(tiny_model.tokenizer(), path)


def test_prompts_are_the_packages_own_or_a_files(tmp_path: Path) -> None:
    words = tiny_model.tokenizer()
    assert len(tuning_prompts(words, None)) >= 10
    path = tmp_path / "own.jsonl"
    path.write_text('{"instruction": "Why?", "output": "So."}\n' * 2)
    assert len(tuning_prompts(words, path)) == 1
