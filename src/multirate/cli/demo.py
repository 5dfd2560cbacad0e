"""`multirate demo`: a model answers with and without drafts, then a table compares methods."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multirate.cli import options
from multirate.cli.bench_run import BenchMachine, Measuring, run

if TYPE_CHECKING:
    from multirate.decoding.results import DecodeStats
    from multirate.engine import Engine
    from multirate.lab.bench.rows import Row

QUESTIONS = (
    "How do noise-cancelling headphones work?",
    "Write a short story about a fox who learns to share.",
    "Explain why the sky is blue to a child.",
    "Give three tips for staying healthy.",
    "Describe a quiet morning by the sea.",
    "Tom has 12 apples and gives 5 to Ann. How many apples are left?",
)
UNTRAINED = " (no training)"
WARM_UP = 8
"""Tokens generated before an answer is timed, for what is measured once per machine."""


def is_trained(method: str) -> bool:
    """Whether a row is a trained drafter's, and not a baseline's or text lookup's."""
    from multirate.lab.bench.rows import REFERENCES
    from multirate.methods.spec import find, parse_variant

    return method not in REFERENCES and find(parse_variant(method)[0]).training is not None


def label(method: str) -> str:
    from multirate.lab.bench.rows import REFERENCES
    from multirate.methods.spec import PLAIN, find, parse_variant

    if method in REFERENCES:
        return "multirate, plain loop" if method == PLAIN else f"transformers {method}"
    name = parse_variant(method)[0]
    return (find(name).plain_name or name) + (" + text lookup" if is_trained(method) else UNTRAINED)


def spoken(row: Row) -> str:
    """A method's name in a sentence."""
    name = label(row.method).removesuffix(UNTRAINED)
    return name.replace("multirate, plain loop", "multirate's plain loop")


def warm_up(engine: Engine, method: str) -> None:
    """Answers another question, so that only decoding is timed."""
    _generate(engine, method, QUESTIONS[1], WARM_UP)


def first_answer(
    engine: Engine, method: str, max_new_tokens: int, emit: Callable[[str], Any]
) -> DecodeStats:
    """Answers the first question greedily. emit(text) gets each piece of text as it is ready."""
    from multirate.decoding.text_stream import TextStream

    stream = TextStream(engine.tokenizer, emit)
    stats = _generate(
        engine, method, QUESTIONS[0], max_new_tokens, lambda _, tokens: stream.push(tokens)
    )
    stream.end()
    return stats


def _generate(
    engine: Engine, method: str, question: str, max_new_tokens: int, on_tokens: Any = None
) -> DecodeStats:
    return engine.generate(
        [options.prompt_ids(engine.tokenizer, question)],
        engine.sampling(temperature=0.0),
        stop=engine.stopping(max_new_tokens),
        method=method,
        on_tokens=on_tokens,
        speculate="always",  # show the method itself, even where plain decoding is faster
    ).stats


def answer(engine: Engine, method: str, heading: str, max_new_tokens: int) -> None:
    """Streams the answer to the first question, then prints its speed."""
    typer.echo(f"{heading}\n")
    warm_up(engine, method)
    seen = first_answer(engine, method, max_new_tokens, lambda text: typer.echo(text, nl=False))
    rate = seen.tokens / max(seen.seconds, 1e-9)
    typer.echo(f"\n\n[{seen.tokens} tokens in {seen.seconds:.2f} s: {rate:.0f} tokens/s]\n")


def table(rows: Sequence[Row]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    result = Table(box=SIMPLE_HEAD, pad_edge=False)
    result.add_column("method")
    for heading in ("tokens/s", "speedup", "same text"):
        result.add_column(heading, justify="right")
    for row in rows:
        result.add_row(
            label(row.method),
            f"{row.tokens_per_second:.0f}"
            if row.tokens_per_second >= 100
            else f"{row.tokens_per_second:.1f}",
            "withheld" if row.speedup is None else f"{row.speedup:.2f}x",
            _same_text(row),
        )
    return result


def _same_text(row: Row) -> str:
    if not row.lossless:
        return "not compared"
    return "NO" if row.diverged else "up to rounding" if row.near_ties else "yes"


def explanation(rows: Sequence[Row]) -> list[str]:
    from multirate.lab.bench.rows import REFERENCES, reference_row

    against = reference_row(rows)
    found = []
    if against is not None:
        found.append(f"Speedup: tokens/s compared with {spoken(against)}.")
    if any(is_trained(row.method) for row in rows):
        found.append("The speedup of a trained drafter includes text lookup.")
    drafting = [row for row in rows if row.method not in REFERENCES and row.speedup is not None]
    if against is not None and drafting:
        found.append(_fastest(against, drafting))
    ties = [row for row in rows if row.near_ties and row.lossless]
    if any(row.diverged for row in rows):
        found.append("Same text: NO marks wrong answers. Please report them as a bug.")
    elif ties:
        names = ", ".join(f"{row.near_ties} by {spoken(row)}" for row in ties)
        found.append(
            f"Same text: all answers are the same, token for token, except {names}. Those differ "
            "only where two tokens score the same up to rounding, so either is right."
        )
    else:
        found.append("Same text: all answers are the same, token for token.")
    others = [spoken(row) for row in rows if not row.lossless]
    if others:
        found.append(
            f"Not compared: {', '.join(others)} runs this file's weights expanded to bf16, so its "
            "text may differ."
        )
    return found


def _fastest(against: Row, drafting: Sequence[Row]) -> str:
    """Which row is fastest, and where M2R2 is."""
    from multirate.methods.spec import parse_variant, recommended

    best = max(drafting, key=lambda row: row.tokens_per_second)
    lookup, m2r2 = (
        next((row for row in drafting if parse_variant(row.method)[0] == name), None)
        for name in (recommended(trained=False), recommended())
    )

    def compared(row: Row) -> str:
        speedup = row.tokens_per_second / against.tokens_per_second
        said = f"{speedup:.2f}x the speed of {spoken(against)}"
        if lookup is not None and row is not lookup:
            ratio = row.tokens_per_second / lookup.tokens_per_second
            said += f" and {ratio:.2f}x that of text lookup"
        return said

    if best.tokens_per_second <= against.tokens_per_second:
        first = f"Drafting is not faster here: {spoken(against)} is the fastest row."
    else:
        first = f"Fastest here: {spoken(best)}, at {compared(best)}."
    if m2r2 is not None and m2r2 is not best:
        first += f" {spoken(m2r2)} has {compared(m2r2)}."
    return f"{first} This is one short run, so expect some noise."


def command(
    model: options.Model = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Maximum number of tokens per answer.")
    ] = 96,
    repeats: Annotated[int, typer.Option(help="Measured repeats of all prompts.")] = 1,
    *,
    machine: BenchMachine,
) -> None:
    """Watch a model answer with and without drafts, then compare the speed of several methods."""
    how = Measuring(max_new_tokens, repeats)

    from multirate.engine import PLAIN
    from multirate.lab.bench.rows import REFERENCES
    from multirate.lab.bench.suites import Question
    from multirate.loading.hub import reference_accelerators
    from multirate.methods.spec import find, joined_variant, recommended

    loaded, engine = machine.attach(model)
    own = {
        name: path for name, path in reference_accelerators(model).items() if find(name).plain_name
    }
    options.add_accelerators(engine, [], list(own), own)
    parameters = sum(p.numel() for p in loaded.model.parameters())
    typer.echo(
        f"{loaded.name}: {parameters / 1e6:.1f}M parameters, {engine.decoder.info.num_layers} "
        f"layers, {engine.weights}, {engine.backend} backend, {engine.decoder.info.device.type}\n"
    )
    lookup = recommended(trained=False)
    drafting = recommended() if recommended() in engine.accelerators else lookup
    typer.echo(f"Question: {QUESTIONS[0]}\n")
    answer(engine, PLAIN, "Without drafts:", max_new_tokens)
    answer(engine, drafting, f"With drafts from {label(drafting)}:", max_new_tokens)
    joined = [joined_variant(name, engine.spec_of(name)) or name for name in engine.accelerators]
    typer.echo(
        f"Now all methods answer the same {len(QUESTIONS)} questions: one at a time, greedy, up to "
        f"{max_new_tokens} tokens."
    )
    console = options.console()

    def show(rows: Sequence[Row]) -> None:
        console.print(table(rows))
        for sentence in explanation(rows):
            console.print(sentence)

    measured = run(
        engine,
        [Question(str(number), (text,)) for number, text in enumerate(QUESTIONS, start=1)],
        [*REFERENCES, lookup, *joined],
        how,
        show=show,
    )
    measured.end()
    # `make demo` runs the command from a folder that is not in PATH
    local = shutil.which("multirate") is None and Path(sys.argv[0]).name == "multirate"
    program = shlex.quote(os.path.relpath(sys.argv[0])) if local else "multirate"
    named = shlex.quote(model or loaded.name)
    typer.echo(
        "\nNext:\n"
        f'  {program} generate {named} -p "Write a haiku about rain." --stats\n'
        f"  {program} answers {named} --questions 100 --out answers.jsonl\n"
        "The second command writes training text, to train a drafter of your own."
    )
