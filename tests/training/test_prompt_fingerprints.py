"""What an accelerator was trained on: kept beside it, and found again in other words' clothes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multirate.errors import UserError
from multirate.lab.bench.seen_prompts import UNKNOWN, seen_prompts, warnings_of
from multirate.lab.bench.suites import Question
from multirate.training.checkpoint import Accelerator
from multirate.training.prompt_fingerprints import PROMPTS, add_fingerprints, prompt_fingerprint

from .test_checkpoint import accelerator, small


def test_white_space_and_case_do_not_hide_a_prompt() -> None:
    assert prompt_fingerprint("Why is  the\nSky blue?") == prompt_fingerprint(
        "why is the sky blue?"
    )
    assert prompt_fingerprint("Why is the sky blue?") != prompt_fingerprint("Why is the sky red?")


def test_kept_beside_the_accelerator_and_checked(tmp_path: Path) -> None:
    model = small()
    made = accelerator(model)
    made.save_pretrained(tmp_path)
    assert Accelerator.from_pretrained(tmp_path, model).prompts is None
    asked = [{"instruction": f"Question {i}?", "output": "Yes."} for i in (1, 2, 2)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, asked)))
    assert add_fingerprints(tmp_path, [tmp_path / "data.jsonl"]) == 2
    loaded = Accelerator.from_pretrained(tmp_path, model)
    assert loaded.prompts == {prompt_fingerprint("question 1?"), prompt_fingerprint("question 2?")}
    loaded.save_pretrained(tmp_path / "again")
    assert Accelerator.from_pretrained(tmp_path / "again", model).prompts == loaded.prompts
    (tmp_path / PROMPTS).write_bytes(b"other")
    with pytest.raises(UserError, match=PROMPTS):
        Accelerator.from_pretrained(tmp_path, model)


def test_a_bench_knows_which_questions_were_trained_on() -> None:
    made, other = accelerator(small()), accelerator(small())
    made.prompts = frozenset(map(prompt_fingerprint, ["Two?", "Four?"]))
    questions = [Question(str(i), turns) for i, turns in enumerate([("One?", "two?"), ("FOUR?",)])]
    found = seen_prompts({"m2r2-carry": made, "other": other}, questions)
    assert found == {"m2r2-carry": {"prompts": 2, "first": "0"}, "other": UNKNOWN}
    (warning,) = warnings_of(found)
    assert "m2r2-carry" in warning and "2 of" in warning
    assert not warnings_of(seen_prompts({"m2r2-carry": made}, [Question("5", ("Five?",))]))
