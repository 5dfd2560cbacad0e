"""`multirate answers`: has a model write training text for its accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multirate.cli import options
from multirate.errors import UserError


def command(
    model: options.BaseModel,
    out: Annotated[
        Path, typer.Option("--out", help="JSONL file to write. An unfinished file is continued.")
    ],
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="JSON or JSONL file of questions (repeatable)."),
    ] = None,
    questions: Annotated[
        int, typer.Option(min=0, help="Number of questions to sample from the model itself.")
    ] = 0,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens per answer.")
    ] = 160,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Number of questions of --data, spread evenly (default: all)."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Answers generated at once.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for --questions.")] = 0,
    dtype: options.Dtype = "auto",
    weights: options.Weights = "file",
    device: options.Device = "auto",
    threads: options.Threads = None,
    experts: options.Experts = None,
) -> None:
    """Have a model answer questions, to train its accelerator on its own text.

    The questions come from --data, from the model itself (--questions), or both. Sampled questions
    are kept in OUT.questions.jsonl. On a CPU, a mixture of experts answers faster with --experts.
    """
    if not data and not questions:
        raise UserError("there are no questions: give --data FILE, --questions COUNT, or both")
    options.set_threads(threads)

    from multirate.cli.progress import Bar
    from multirate.engine import attach
    from multirate.io import check_writable
    from multirate.training.fingerprint import fingerprint
    from multirate.training.own_answers import (
        Questions,
        answer_questions,
        look_for_records,
        read_questions,
    )
    from multirate.training.sampled_questions import QuestionSettings, sample_questions

    settings = QuestionSettings(seed=seed)
    look_for_records(check_writable(out))
    asked = read_questions(data, limit) if data else []
    loaded = options.load(model, dtype, device, experts, weights=weights)
    engine = attach(loaded, expert_policy=None if experts is None else "lru")
    stop = engine.stopping(max_new_tokens)
    if questions:
        path = out.with_name(f"{out.name.removesuffix('.jsonl')}.questions.jsonl")
        with Bar("sampling questions", questions) as bar:
            sampled = sample_questions(
                engine.decoder,
                loaded.tokenizer,
                questions,
                check_writable(path),
                stop.eos_token_ids,
                fingerprint(loaded.model),
                settings,
                [one.users[0] for one in asked],
                batch,
                bar.to,
            )
        reasons = ", ".join(f"{count} {why}" for why, count in sampled.left_out.most_common())
        typer.echo(
            f"kept {len(sampled.questions)} of {sampled.samples} sampled questions in {path}"
            + (f" (left out: {reasons})" if reasons else "")
        )
        asked += [Questions((text,)) for text in sampled.questions]
    with Bar("answering", len(asked)) as bar:
        count = answer_questions(
            engine.decoder,
            loaded.tokenizer,
            asked,
            out,
            stop.eos_token_ids,
            max_new_tokens,
            batch,
            bar.to,
            fingerprint(loaded.model),
            engine.sampling(temperature=0.0),
            stop.stop_strings,
        )
    typer.echo(f"{count} answers in {out}")
