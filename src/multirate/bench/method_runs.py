"""What a bench compares: the engine's methods, and transformers' `generate` as a user runs it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig

from multirate.bench.runner import Answer, MethodRun
from multirate.decoding.logits import SamplingSettings
from multirate.engine import Engine

GENERATE = "generate"


def method_run(engine: Engine, name: str, max_new_tokens: int) -> MethodRun:
    """A greedy run of one method: `generate`, or a method of the engine. UserError for a method it
    does not have.
    """
    if name == GENERATE:
        return _transformers(engine.model, engine.stopping().eos_token_ids, max_new_tokens)
    stop = engine.stopping(max_new_tokens)

    def run(prompt: list[int]) -> Answer:
        output = engine.generate(
            [prompt], SamplingSettings(), stop, method=name, speculate="always"
        )
        seen = output.stats
        return Answer(
            output.sequences[0],
            stepped=seen.tokens - seen.first_tokens,
            steps=seen.sequence_steps,
            drafted=seen.drafted_levels,
            accepted=seen.accepted,
        )

    return MethodRun(name, run, engine.lossless(name), engine.forget)


def _transformers(model: Any, eos_token_ids: tuple[int, ...], max_new_tokens: int) -> MethodRun:
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=eos_token_ids[0] if eos_token_ids else 0,
        # Some models' own settings penalise repetition; every method decodes the bare model.
        repetition_penalty=1.0,
    )

    def run(prompt: list[int]) -> Answer:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
        tokens = out[0, len(prompt) :].tolist()
        return Answer(tokens, stepped=len(tokens) - 1, steps=len(tokens) - 1)

    return MethodRun(GENERATE, run)
