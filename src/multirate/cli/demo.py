"""`multirate demo`: what this does, offline, on the embedded reference model."""

from __future__ import annotations

from typing import Annotated

import typer

from multirate.cli import options
from multirate.cli.bench import WRONG_ANSWERS, run
from multirate.cli.errors import INTERRUPTED
from multirate.errors import UserError

QUESTIONS = (
    "What causes high blood pressure?",
    "Write a short story about a fox who learns to share.",
    "Explain why the sky is blue to a child.",
    "Give three tips for staying healthy.",
    "Describe a quiet morning by the sea.",
    "Tom has 12 apples and gives 5 to Ann. How many apples are left?",
)


def command(
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="At most so many per answer.")
    ] = 96,
    repeats: Annotated[int, typer.Option(help="Measured passes over all prompts.")] = 2,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    threads: options.Threads = None,
) -> None:
    """Plain decoding and M2R2 side by side on the embedded model: speed, and that the text is the
    same.
    """
    for name, value in (("--max-new-tokens", max_new_tokens), ("--repeats", repeats)):
        if value < 1:
            raise UserError(f"{name} is {value}: at least 1 is needed")
    options.set_threads(threads)

    from multirate.bench.prompts import encode_chat
    from multirate.bench.runner import BASELINES
    from multirate.bench.suites import Question
    from multirate.engine import attach
    from multirate.hub import reference_accelerators
    from multirate.methods.spec import recommended

    presets = list(reference_accelerators())
    loaded = options.load(None, dtype, device)
    engine = attach(loaded.model, backend=backend, tokenizer=loaded.tokenizer)
    options.add_accelerators(engine, [], presets, embedded=True)
    parameters = sum(p.numel() for p in loaded.model.parameters())
    typer.echo(
        f"Reference model: {parameters / 1e6:.1f}M parameters, {engine.decoder.info.num_layers} "
        f"layers, {dtype}, {engine.backend} backend, {engine.decoder.info.device.type}."
    )
    ids = encode_chat(loaded.tokenizer, [{"role": "user", "content": QUESTIONS[0]}])
    typer.echo(f"\n> {QUESTIONS[0]}\n")
    answer = engine.generate([ids], stop=engine.stopping(max_new_tokens), speculate="always")
    typer.echo(
        loaded.tokenizer.decode(answer.sequences[0], skip_special_tokens=True).strip() + "\n"
    )
    _, rows, interrupted = run(
        engine,
        [Question(str(number), (text,)) for number, text in enumerate(QUESTIONS, start=1)],
        [*BASELINES, recommended(trained=False), *engine.accelerators],
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        warmup=1,
        truncate=False,
        title=f"{len(QUESTIONS)} prompts, up to {max_new_tokens} tokens each, batch 1, greedy",
        settings={},
    )
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if any(row.diverged for row in rows):
        raise typer.Exit(WRONG_ANSWERS)
    exact = all(row.identical == len(QUESTIONS) for row in rows)
    typer.echo(
        "identical: yes" if exact else "identical: up to near-ties of bf16 rounding (see the table)"
    )
