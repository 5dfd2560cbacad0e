"""Measures the quality of dynamic mode: its answers compared with the full model's choice after the
same text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multirate.decoding.loop import generate
from multirate.decoding.prefill import score
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.io import spread
from multirate.lab.calibration.repetition import in_loops
from multirate.runtime.decoder import Decoder
from multirate.torch_modes import own_modes
from multirate.training.data import prompt_of, read_conversations, render_prompt


@dataclass(frozen=True)
class Measured:
    """One answer.

    tokens: its tokens; differing: how many of them differ from the full model's choice after the
        same text.
    highest_rejected: with any threshold above this, up to its own, the answer is the same; None:
        unknown.
    looping: tokens that only repeat the text right before them (repetition.py).
    """

    tokens: int
    differing: int
    highest_rejected: float | None = field(default=None, compare=False)
    looping: int = field(default=0, compare=False)

    @property
    def loss(self) -> float:
        """Share of the tokens that differ."""
        return self.differing / self.tokens if self.tokens else 0.0


def read_prompts(
    files: Sequence[str | Path], tokenizer: Any, room: int | None, limit: int | None = None
) -> list[list[int]]:
    """Token ids of the data's prompts: each conversation's turns up to its first question, and the
    first half of each plain text. Duplicates (by normalised text) appear once.

    room: longer prompts are left out. limit: maximum number of prompts, spread evenly. Raises
    UserError for unusable data.
    """
    found: dict[str, list[int]] = {}
    too_long = 0
    for file in files:
        for conversation in read_conversations(file, answered=False):
            if conversation.turns:
                roles = [role for role, _ in conversation.turns]
                if "user" not in roles:
                    continue
                asked = conversation.turns[: roles.index("user") + 1]
                text = render_prompt(tokenizer, asked, conversation.where)
                ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            else:
                ids = list(tokenizer(conversation.text)["input_ids"])
                ids = ids[: (len(ids) + 1) // 2]
            fits = room is None or len(ids) <= room
            too_long += not fits
            if ids and fits:
                found.setdefault(prompt_of(conversation), ids)
    prompts = list(found.values())
    if not prompts:
        names = ", ".join(str(file) for file in files)
        raise UserError(
            f"no prompt in {names} leaves room for an answer in the model's context"
            if too_long
            else f"no record in {names} has a non-empty prompt"
        )
    return spread(prompts, limit)


@dataclass(frozen=True)
class Verdict:
    """The full model's judgement of an answer's tokens, each after the text before it: how many
    differ from its argmax, and the sum of their negative log-probabilities (nats).
    """

    tokens: int = 0
    differing: int = 0
    nats: float = 0.0


@own_modes()
def full_model_on(decoder: Decoder, prompt: Sequence[int], tokens: Sequence[int]) -> Verdict:
    """The full model's verdict, from one reading of prompt and answer."""
    each, said = score(decoder, prompt, tokens)
    differing = sum(ours != theirs for ours, theirs in zip(tokens, said, strict=True))
    return Verdict(len(tokens), differing, -math.fsum(each))


def answers(
    decoder: Decoder,
    step: Step,
    prompts: Sequence[Sequence[int]],
    stop: StopSettings,
    batch: int = 8,
    threshold: float = -math.inf,
    before: Sequence[Measured] = (),
) -> Iterator[Measured]:
    """Each prompt's greedy answer by `step`, measured, in the order of the prompts; `batch` prompts
    are decoded at once.

    threshold: the step's. before: the answers with a higher threshold; answers that are known to be
    the same are not decoded again.
    """
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        known = before[first : first + batch]
        if len(known) == len(part) and all(
            one.highest_rejected is not None and one.highest_rejected < threshold for one in known
        ):
            yield from known
            continue
        output = generate(decoder, step, part, stop=stop)
        for prompt, tokens in zip(part, output.sequences, strict=True):
            verdict = full_model_on(decoder, prompt, tokens)
            looping = int(in_loops(tokens).sum())
            yield Measured(len(tokens), verdict.differing, output.stats.highest_rejected, looping)
