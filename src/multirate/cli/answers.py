"""`multirate answers`: has a model write training text for its accelerator."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multirate.cli import options
from multirate.errors import UserError

if TYPE_CHECKING:
    from multirate.decoding.logits import SamplingSettings
    from multirate.decoding.stopping import StopSettings
    from multirate.engine import Engine
    from multirate.training.own_answers import Answering, Questions


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
    experts: options.Experts = None,
    ray: Annotated[
        bool,
        options.written(
            "--ray",
            help="Answer with several copies of the model, with Ray Data (on the cluster of "
            "RAY_ADDRESS, else on this machine alone).",
        ),
    ] = False,
    replicas: Annotated[int, typer.Option(min=1, help="Copies of the model, with --ray.")] = 2,
    *,
    loading: options.Loading,
) -> None:
    """Have a model answer questions, to train its accelerator on its own text.

    The questions come from --data, from the model itself (--questions), or both. Sampled questions
    are kept in OUT.questions.jsonl. On a CPU, a mixture of experts answers faster with --experts.
    """
    if not data and not questions:
        raise UserError("there are no questions: give --data FILE, --questions COUNT, or both")
    if ray:
        options.check_ray()
        if experts is not None:
            raise UserError("--ray and --experts cannot be used together")

    from multirate.cli.progress import Bar
    from multirate.engine import attach
    from multirate.io import check_writable
    from multirate.training.fingerprint import fingerprint
    from multirate.training.own_answers import answer_questions, look_for_records, read_questions

    look_for_records(check_writable(out))
    asked = read_questions(data, limit) if data else []
    loaded = loading.load(model, experts)
    engine = attach(loaded, expert_policy=None if experts is None else "lru")
    stop = engine.stopping(max_new_tokens)
    if questions:
        texts = [one.users[0] for one in asked]
        asked += _sampled(engine, questions, out, seed, texts, batch)
    sampling = engine.sampling(temperature=0.0)
    answering = _on_ray(model, loading, stop, sampling, replicas) if ray else None
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
            sampling,
            stop.stop_strings,
            answering,
        )
    typer.echo(f"{count} answers in {out}")


def _on_ray(
    model: str,
    loading: options.Loading,
    stop: StopSettings,
    sampling: SamplingSettings,
    replicas: int,
) -> Answering:
    from multirate.training.answers_on_ray import on_ray

    cpus = max((os.cpu_count() or 1) // replicas, 1)
    return on_ray(partial(loading.load, model), stop, sampling, replicas, cpus)


def _sampled(
    engine: Engine, count: int, out: Path, seed: int, known: list[str], batch: int
) -> list[Questions]:
    """Questions that the model wrote, other than the `known` ones, kept beside `out`."""
    from multirate.cli.progress import Bar
    from multirate.io import check_writable
    from multirate.training.fingerprint import fingerprint
    from multirate.training.own_answers import Questions
    from multirate.training.sampled_questions import QuestionSettings, sample_questions

    path = out.with_name(f"{out.name.removesuffix('.jsonl')}.questions.jsonl")
    with Bar("sampling questions", count) as bar:
        sampled = sample_questions(
            engine.decoder,
            engine.tokenizer,
            count,
            check_writable(path),
            engine.stopping().eos_token_ids,
            fingerprint(engine.model),
            QuestionSettings(seed=seed),
            known,
            batch,
            bar.to,
        )
    reasons = ", ".join(f"{count} {why}" for why, count in sampled.left_out.most_common())
    typer.echo(
        f"kept {len(sampled.questions)} of {sampled.samples} sampled questions in {path}"
        + (f" (left out: {reasons})" if reasons else "")
    )
    return [Questions((text,)) for text in sampled.questions]
