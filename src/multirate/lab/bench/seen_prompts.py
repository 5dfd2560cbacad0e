"""Which questions of a suite an accelerator was trained on: its results on them are too good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from multirate.lab.bench.suites import Question
from multirate.training.checkpoint import Accelerator
from multirate.training.prompt_fingerprints import prompt_fingerprint

UNKNOWN = "unknown"


def seen_prompts(
    accelerators: Mapping[str, Accelerator], questions: Sequence[Question]
) -> dict[str, Any]:
    """By accelerator {"prompts": how many questions, "first": the first one's id or None}, or
    UNKNOWN where nothing beside it says what it was trained on.
    """
    hashes = [(q.id, {prompt_fingerprint(turn) for turn in q.turns}) for q in questions]
    found: dict[str, Any] = {}
    for name, accelerator in accelerators.items():
        if accelerator.prompts is None:
            found[name] = UNKNOWN
            continue
        seen = [number for number, turns in hashes if turns & accelerator.prompts]
        found[name] = {"prompts": len(seen), "first": seen[0] if seen else None}
    return found


def warnings_of(found: Mapping[str, Any]) -> list[str]:
    """A sentence for each accelerator that was trained on some of the questions."""
    return [
        f"{name} was trained on {about['prompts']} of these questions (the first is "
        f"{about['first']}), so its results do not carry over to other texts"
        for name, about in found.items()
        if about != UNKNOWN and about["prompts"]
    ]
