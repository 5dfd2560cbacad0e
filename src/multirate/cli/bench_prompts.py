"""Turns a bench's questions into prompts, and reports questions that do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multirate.cli import options
from multirate.cli.progress import Bar

if TYPE_CHECKING:
    from multirate.engine import Engine
    from multirate.lab.bench.prompts import PromptSet
    from multirate.lab.bench.suites import Question


def prepared(
    engine: Engine, questions: list[Question], max_new_tokens: int, truncate: bool
) -> PromptSet:
    """The prompts of all questions. Prints which are skipped or cut."""
    from multirate.decoding.logits import SamplingSettings
    from multirate.lab.bench.prompts import build_prompts
    from multirate.methods.spec import PLAIN

    greedy, stop = SamplingSettings(), engine.stopping(max_new_tokens, ())
    options.note_left_out(engine, " with every method")
    with Bar("preparing prompts", len(questions)) as bar:
        prompts = build_prompts(
            questions,
            engine.tokenizer,
            lambda ids: engine.generate([ids], greedy, stop, PLAIN).sequences[0],
            max_positions=engine.decoder.info.max_positions,
            max_new_tokens=max_new_tokens,
            truncate=truncate,
            on_question=bar.advance,
        )
    if prompts.skipped:
        options.note(
            f"note: skipped {_some(prompts.skipped)}, too long for the context with "
            f"{max_new_tokens} new tokens (--truncate cuts long prompts instead)"
        )
    if prompts.truncated:
        options.note(f"note: cut {_some(prompts.truncated)} from the left, to fit the context")
    return prompts


def _some(names: list[str]) -> str:
    """How many prompts, and the first of them."""
    first = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
    return f"{len(names)} prompt{'s' * (len(names) != 1)} ({first})"
