"""`multirate demo`: SmolLM2 answers while you watch, plainly and with drafts; then both are
measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from multirate.cli import options
from multirate.cli.bench import WRONG_ANSWERS, run
from multirate.cli.errors import INTERRUPTED
from multirate.errors import UserError

if TYPE_CHECKING:
    from multirate.engine import Engine

QUESTIONS = (
    "What causes high blood pressure?",
    "Write a short story about a fox who learns to share.",
    "Explain why the sky is blue to a child.",
    "Give three tips for staying healthy.",
    "Describe a quiet morning by the sea.",
    "Tom has 12 apples and gives 5 to Ann. How many apples are left?",
)


WARM_UP = 8
"""Tokens decoded before an answer is timed: what is measured once of this machine, and kept."""


def answer(engine: Engine, method: str, max_new_tokens: int) -> None:
    """Streams the answer to the first question, and says how fast it came."""
    from multirate.chat_template import encode_chat
    from multirate.cli.stream import printed

    tokenizer = engine.tokenizer
    typer.echo(f"\n{method}> {QUESTIONS[0]}\n")
    stream = printed(tokenizer)
    other, prompt = (
        encode_chat(tokenizer, [{"role": "user", "content": text}])
        for text in (QUESTIONS[1], QUESTIONS[0])
    )
    engine.prepare(method)
    sampling = engine.sampling(temperature=0.0)
    engine.generate([other], sampling, engine.stopping(WARM_UP), method, speculate="always")
    output = engine.generate(
        [prompt],
        sampling,
        stop=engine.stopping(max_new_tokens),
        method=method,
        on_tokens=lambda _, tokens: stream.push(tokens),
        speculate="always",  # the method itself; whether it pays is what the table says
    )
    stream.end()
    seen = output.stats
    typer.echo(
        f"\n\n[{seen.tokens} tokens, {seen.tokens / max(seen.seconds, 1e-9):.0f} tokens/s, "
        f"{seen.tokens_per_step:.2f} tokens per step]\n"
    )


def command(
    model: options.Model = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="At most so many per answer.")
    ] = 96,
    repeats: Annotated[int, typer.Option(help="Measured passes over all prompts.")] = 1,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    threads: options.Threads = None,
) -> None:
    """Plain decoding and M2R2 side by side: an answer while it is written, the speed of each, and
    that the text is the same.
    """
    for name, value in (("--max-new-tokens", max_new_tokens), ("--repeats", repeats)):
        if value < 1:
            raise UserError(f"{name} is {value}: at least 1 is needed")
    options.set_threads(threads)

    from multirate.bench.runner import BASELINES
    from multirate.bench.suites import Question
    from multirate.engine import PLAIN, attach
    from multirate.hub import reference_accelerators
    from multirate.methods.spec import recommended

    loaded = options.load(model, dtype, device)
    engine = attach(loaded, backend=backend)
    own = reference_accelerators(model)
    options.add_accelerators(engine, [], list(own), own)
    parameters = sum(p.numel() for p in loaded.model.parameters())
    typer.echo(
        f"{loaded.name}: {parameters / 1e6:.1f}M parameters, {engine.decoder.info.num_layers} "
        f"layers, {dtype}, {engine.backend} backend, {engine.decoder.info.device.type}."
    )
    drafting = recommended() if recommended() in engine.accelerators else recommended(trained=False)
    for method in (PLAIN, drafting):
        answer(engine, method, max_new_tokens)
    _, rows, measured = run(
        engine,
        [Question(str(number), (text,)) for number, text in enumerate(QUESTIONS, start=1)],
        [*BASELINES, recommended(trained=False), *engine.accelerators],
        rivals={},
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        warmup=1,
        truncate=False,
        title=f"{len(QUESTIONS)} prompts, up to {max_new_tokens} tokens each, batch 1, greedy",
        settings={},
    )
    if measured.interrupted:
        raise typer.Exit(INTERRUPTED)
    if measured.failed or any(row.diverged for row in rows):
        raise typer.Exit(WRONG_ANSWERS)
    exact = all(row.identical == len(QUESTIONS) for row in rows)
    typer.echo(
        "identical: yes" if exact else "identical: up to near-ties of bf16 rounding (see the table)"
    )
