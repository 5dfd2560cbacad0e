"""What the demo prints: a table, what it shows, and commands to try."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from multirate.cli.demo import QUESTIONS, explanation, label
from multirate.lab.bench.rows import Row
from multirate.loading.hub import reference_accelerators
from multirate.training.prompt_fingerprints import prompt_fingerprint, read_fingerprints


def row(method: str, rate: float, near_ties: int = 0, diverged: int = 0) -> Row:
    speedup = None if diverged else rate / 100
    same = 6 - near_ties - diverged
    return Row(
        method, True, 96, 1.0, rate, speedup, 0.0, 1.0, None, same, near_ties, diverged
    )  # fmt: skip


BASE = [row("generate", 40), row("autoregressive", 100), row("sam", 125)]


def test_names_say_what_a_row_contains() -> None:
    assert label("m2r2-carry:lookup=sam") == "M2R2 + text lookup"
    assert label("sam") == "text lookup (no training)"


@pytest.mark.parametrize(
    "rows, expected",
    [
        ([row("m2r2-carry:lookup=sam", 150)], "Fastest here: M2R2 + text lookup, at 1.50x"),
        (
            [row("m2r2-carry:lookup=sam", 110), row("eagle:lookup=sam", 200)],
            "Fastest here: EAGLE + text lookup, at 2.00x the speed of multirate's plain loop and "
            "1.60x that of text lookup. M2R2 + text lookup has 1.10x",
        ),
        ([], "Fastest here: text lookup, at 1.25x"),
    ],
)
def test_the_fastest_row_is_computed(rows: list[Row], expected: str) -> None:
    assert expected in " ".join(explanation([*BASE, *rows]))


def test_slow_drafts_and_other_texts_are_not_hidden() -> None:
    slow = [row("generate", 40, near_ties=2), row("autoregressive", 100), row("sam", 80)]
    text = " ".join(explanation(slow))
    assert "Drafting is not faster here" in text and "except 2 by transformers generate" in text
    assert "NO marks wrong answers" in " ".join(explanation([*BASE, row("eagle", 9, 0, 1)]))
    other = replace(BASE[0], lossless=False, near_ties=2)  # of a quantised file
    text = " ".join(explanation([other, *BASE[1:]]))
    assert "all answers are the same" in text and "Not compared: transformers generate" in text


def test_the_demo_ends_with_commands_to_try() -> None:
    command = [sys.executable, "-m", "multirate.cli.main", "demo", "tiny", "-n", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for part in ("Without drafts:", "With drafts from ", "speedup", "Same text: ", "\nNext:\n"):
        assert part in done.stdout
    assert 'generate tiny -p "Write a haiku about rain." --stats' in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.parametrize("method", sorted(reference_accelerators()))
def test_no_shipped_accelerator_was_trained_on_a_question_of_the_demo(method: str) -> None:
    folder = reference_accelerators()[method]
    trained_on = read_fingerprints(folder, json.loads((folder / "accelerator.json").read_text()))
    assert trained_on and prompt_fingerprint("What causes high blood pressure ?") in trained_on
    for question in QUESTIONS:
        for text in (question, f"{question[:-1]} {question[-1]}"):  # MedQuAD writes "pressure ?"
            assert prompt_fingerprint(text) not in trained_on, question
