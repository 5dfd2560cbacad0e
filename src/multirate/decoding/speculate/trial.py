"""A few short texts that measure how many of a drafter's tokens a model accepts. [ours]"""

from __future__ import annotations

import time
from collections.abc import Sequence

from multirate.decoding.loop import generate
from multirate.decoding.results import DecodeStats
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.runtime.decoder import Decoder

TEXTS = (
    "The capital of France is",
    "Once upon a time there was a fox who",
    "To bake bread at home, first",
    "def mean(values):\n    return",
)
TOKENS = 24
SECONDS = (
    3.0  # no further text is begun after so long: a large model is not to keep its user waiting
)


def try_drafts(decoder: Decoder, step: Step, prompts: Sequence[Sequence[int]]) -> DecodeStats:
    """Summed counts of decoding TOKENS tokens after each prompt (ids) with this step. Uses fewer
    prompts if they take longer than SECONDS.
    """
    total = DecodeStats()
    began = time.perf_counter()
    for prompt in prompts:
        seen = generate(decoder, step, [prompt], stop=StopSettings(max_new_tokens=TOKENS)).stats
        total.tokens += seen.tokens
        total.first_tokens += seen.first_tokens
        total.sequence_steps += seen.sequence_steps
        total.drafted += seen.drafted
        total.drafted_levels += seen.drafted_levels
        total.accepted += seen.accepted
        if time.perf_counter() - began > SECONDS:
            break
    return total
