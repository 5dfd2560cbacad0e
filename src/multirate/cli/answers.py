"""`multirate answers`: the model's own answers as training text for its accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multirate.cli import options
from multirate.errors import UserError


def command(
    model: Annotated[
        str, typer.Argument(help="The base model's folder, GGUF file, hub id or name.")
    ],
    out: Annotated[
        Path, typer.Option("--out", help="The JSONL file to write; an unfinished one is continued.")
    ],
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="JSON or JSONL whose questions are asked (repeatable)."),
    ] = None,
    questions: Annotated[
        int,
        typer.Option(min=0, help="Questions that the model asks itself, after those of --data."),
    ] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 160,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Questions of --data asked, spread over it.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded at once.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Of the questions that are sampled.")] = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    experts: options.Experts = None,
) -> None:
    """Let a model answer questions, to train its accelerator on what it really says.

    The questions are a data set's (--data), the model's own (--questions: user turns sampled from
    its chat template; kept in OUT.questions.jsonl), or both. A mixture of experts on a CPU answers
    faster from its store (--experts), all of it in memory.
    """
    if not data and not questions:
        raise UserError("nothing to answer: pass --data FILE, --questions COUNT, or both")
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
    loaded = options.load(model, dtype, device, experts)
    engine = attach(loaded, expert_policy=None if experts is None else "lru")
    stop = engine.stopping(max_new_tokens)
    if questions:
        path = out.with_name(f"{out.name.removesuffix('.jsonl')}.questions.jsonl")
        with Bar("asking", questions) as bar:
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
            f"{len(sampled.questions)} questions of {sampled.samples} samples in {path}"
            + (f" (left out now: {reasons})" if reasons else "")
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
