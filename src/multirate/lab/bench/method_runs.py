"""What a bench compares: the engine's methods, and transformers' `generate`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig

from multirate.decoding.logits import SamplingSettings
from multirate.engine import Engine
from multirate.errors import first_line
from multirate.lab.bench.runner import Answer, MethodRun, Unavailable
from multirate.runtime.quantised import is_quantised, runnable

GENERATE = "generate"
GENERATE_STATIC = "generate-static"


def speculation(engine: Engine) -> str:
    """How methods are measured: as they are used, but where `auto` never drafts."""
    return "auto" if engine.decoder.pass_dependent is None else "always"


def method_run(
    engine: Engine,
    name: str,
    max_new_tokens: int,
    sampling: SamplingSettings | None = None,
) -> MethodRun:
    """A run of `generate`, `generate-static` or a method of the engine.

    sampling: default greedy. With a temperature and a seed a method's text is that of plain
    decoding, token for token, or the method cannot be compared.

    Raises UserError for a method that the engine does not have, Unavailable for one that this
    machine cannot run.
    """
    sampling = sampling or SamplingSettings()
    stop = engine.stopping(max_new_tokens, ())
    if not sampling.greedy and name in (GENERATE, GENERATE_STATIC):
        raise Unavailable(
            f"{name} uses other random numbers when sampling, so its text cannot be compared"
        )
    if name == GENERATE:
        run = transformers_run(runnable(engine.model), stop.eos_token_ids, max_new_tokens)
        return of_expanded_weights(engine, run)
    if name == GENERATE_STATIC:
        run = static_run(runnable(engine.model), stop.eos_token_ids, max_new_tokens)
        return of_expanded_weights(engine, run)

    def run_batch(prompts: list[list[int]]) -> list[Answer]:
        output = engine.generate(
            prompts, sampling, stop, method=name, speculate=speculation(engine)
        )
        seen, (first, *others) = output.stats, output.sequences
        whole = Answer(
            first,
            stepped=seen.tokens - seen.first_tokens,
            steps=seen.sequence_steps,
            drafted=seen.drafted_levels,
            accepted=seen.accepted,
            tried_at=seen.tried_at,
            accepted_at=seen.accepted_at,
            prefill_seconds=seen.prefill_seconds,
            split=seen.split,
        )
        return [whole, *(Answer(tokens, prefill_seconds=0.0) for tokens in others)]

    lossless = engine.lossless(name)
    guarantee = engine.guarantee_of(name)
    note = None if guarantee is None else guarantee.sentence()
    return MethodRun(
        name,
        lambda prompt: run_batch([prompt])[0],
        lossless,
        engine.forget,
        note=note,
        run_batch=run_batch,
    )


def of_expanded_weights(engine: Engine, run: MethodRun) -> MethodRun:
    """A run of transformers' own code: of a quantised model it has other weights than our rows, so
    its text is another one.
    """
    if not is_quantised(engine.model):
        return run
    note = "weights expanded to bf16" + (f", {run.note}" if run.note else "")
    return replace(run, lossless=False, note=note)


def transformers_run(
    model: Any,
    eos_token_ids: tuple[int, ...],
    max_new_tokens: int,
    name: str = GENERATE,
    assistant: Any = None,
    drafts: bool = False,
    note: str | None = None,
    **settings: Any,
) -> MethodRun:
    """transformers' own greedy decoding, with further `settings` of its GenerationConfig. In a
    batch, shorter prompts are padded on their left.

    assistant: another model, which drafts. drafts: whether it, or what `settings` say, does: a pass
    may then give several tokens, the prompt's own among them, and passes are counted.
    """
    padding = eos_token_ids[0] if eos_token_ids else 0
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=padding,
        **settings,
    )

    def run_batch(prompts: list[list[int]]) -> list[Answer]:
        longest = max(map(len, prompts))
        before = [longest - len(prompt) for prompt in prompts]
        rows = zip(before, prompts, strict=True)
        ids = torch.tensor(
            [[padding] * count + prompt for count, prompt in rows], dtype=torch.int64, device="cpu"
        )
        mask = torch.tensor(
            [[0] * count + [1] * (longest - count) for count in before],
            dtype=torch.int64,
            device="cpu",
        )
        with _counted_passes(model) as passes, _bare(model):
            out = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                generation_config=config,
                **({} if assistant is None else {"assistant_model": assistant}),
            )
        answers = [_up_to_end(new, eos_token_ids) for new in out[:, longest:].tolist()]
        if drafts:  # of one prompt
            return [Answer(a, stepped=len(a), steps=len(passes)) for a in answers]
        return [Answer(a, stepped=len(a) - 1, steps=len(a) - 1) for a in answers]

    return MethodRun(
        name,
        lambda prompt: run_batch([prompt])[0],
        note=note,
        run_batch=None if drafts else run_batch,
    )


@contextmanager
def _bare(model: Any) -> Iterator[None]:
    """Without what the model's own generation_config asks for, which `generate` would take where a
    config does not say: every method decodes the bare model.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _counted_passes(model: Any) -> Iterator[list[None]]:
    """A list that grows with every pass through all of the model's layers."""
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    passes: list[None] = []

    def count(module: Any, args: Any, output: Any) -> None:
        if config.num_hidden_layers == layers:  # fewer: its own first layers draft
            passes.append(None)

    hook = model.register_forward_hook(count)
    try:
        yield passes
    finally:
        hook.remove()


def _up_to_end(tokens: list[int], eos_token_ids: tuple[int, ...]) -> list[int]:
    """An answer without the padding after its end; the end belongs to it."""
    ends = (place for place, token in enumerate(tokens, start=1) if token in eos_token_ids)
    return tokens[: next(ends, len(tokens))]


def static_run(model: Any, eos_token_ids: tuple[int, ...], max_new_tokens: int) -> MethodRun:
    """`generate` as fast as transformers can make it: a static cache and a compiled forward pass.

    Compiled here, before anything is timed. Raises Unavailable, with the reason, where that fails.
    """
    compiled = copy.copy(model)  # shares the weights; only its `forward` is another
    compiled.forward = torch.compile(model.forward, dynamic=None)
    run = transformers_run(
        compiled,
        eos_token_ids,
        max_new_tokens,
        GENERATE_STATIC,
        cache_implementation="static",
        disable_compile=True,  # it would compile by itself on a GPU only
    )
    try:
        for length in (8, 24):  # two lengths of prompt: what is dynamic is known then
            run.run([1] * length)
    except Exception as error:  # whatever the compiler, or a model it does not suit, raises
        raise Unavailable(f"{GENERATE_STATIC}: {first_line(error)}") from error
    return run
