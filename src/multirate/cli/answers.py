"""`multirate answers`: the model's own answers as training text for its accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multirate.cli import options


def command(
    model: Annotated[
        str, typer.Argument(help="The base model's folder, GGUF file, hub id or name.")
    ],
    data: Annotated[
        list[Path],
        typer.Option("--data", help="JSON or JSONL whose questions are asked (repeatable)."),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="The JSONL file to write; an unfinished one is continued.")
    ],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 160,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Questions asked, spread over the data.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Questions answered at once.")] = 16,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    experts: options.Experts = None,
) -> None:
    """Let a model answer the questions of a data set, to train its accelerator on what it really
    says.

    A mixture of experts on a CPU answers faster from its store (--experts), all of it in memory.
    """
    options.set_threads(threads)

    from multirate.cli.progress import Lines
    from multirate.engine import attach
    from multirate.io import check_writable
    from multirate.training.own_answers import answer_questions

    check_writable(out)
    loaded = options.load(model, dtype, device, experts)
    engine = attach(loaded, expert_policy=None if experts is None else "lru")
    with Lines("answering") as bar:
        count = answer_questions(
            engine.decoder,
            loaded.tokenizer,
            data,
            out,
            engine.stopping().eos_token_ids,
            max_new_tokens,
            limit,
            batch,
            bar.to,
        )
    typer.echo(f"{count} answers in {out}")
