"""`multirate eval`: scores a model on tasks with lm-evaluation-harness."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from multirate.cli import options
from multirate.errors import UserError


def command(
    model: options.Model = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: wikisql, e2e_nlg, dialogsum, a task of lm-eval, or a task's "
            "YAML file."
        ),
    ] = None,
    accelerator: options.Accelerator = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="full (plain decoding), speculative (drafts; the same scores) or dynamic (some "
            "tokens skip layers). Default: full, or speculative with --accelerator."
        ),
    ] = None,
    quality: options.Quality = None,
    threshold: Annotated[
        float | None,
        options.dynamic(
            help="With --mode dynamic, instead of --quality: the lowest exit score at which a "
            "token skips layers."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of the tasks' data (default: $MULTIRATE_EVAL_DATA).")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Number of documents per task (default: all).")
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(help="Number of examples in each prompt (default: the task's own)."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not use the chat template.")] = False,
    speculate: options.Speculate = "auto",
    json: options.Json = None,
    dtype: options.Dtype = "auto",
    weights: options.Weights = "file",
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    threads: options.Threads = None,
) -> None:
    """Score a model on text to SQL, data to text, summaries, or any task of lm-eval."""
    from multirate.lab.evaluation.installed import check_installed
    from multirate.lab.evaluation.task_files import load_tasks, task_names

    names = task_names(tasks or "")
    for option, value, least in (("--limit", limit, 1), ("--shots", shots, 0)):
        if value is not None and value < least:
            raise UserError(f"{option} is {value}: at least {least} is needed")
    check_installed()
    options.set_threads(threads)

    from multirate import provenance
    from multirate.cli.progress import Bar
    from multirate.engine import SPECULATE, attach
    from multirate.io import write_json
    from multirate.lab.evaluation.modes import FULL, SPECULATIVE, Mode, decoding
    from multirate.lab.evaluation.run import evaluate
    from multirate.lab.evaluation.table import table

    wanted = Mode(mode or (FULL if accelerator is None else SPECULATIVE), quality, threshold)
    if speculate not in SPECULATE:
        raise UserError(f"--speculate is {speculate!r}; accepted: {', '.join(SPECULATE)}")
    options.check_json(json)
    asked = load_tasks(names, data, shots)
    loaded = options.load(model, dtype, device, weights=weights)
    engine = attach(loaded, backend=backend)
    if wanted.name == FULL:
        if accelerator is not None:
            options.note(f"note: mode {FULL} does not use --accelerator {accelerator}")
    else:
        options.add_accelerator(engine, model, accelerator)
    how = decoding(engine, wanted, speculate)
    with Bar("evaluating") as bar:
        found = evaluate(engine, how, asked, limit, chat=not raw, progress=bar.to)
    if engine.guarantee is not None:
        options.note(f"note: {engine.guarantee.sentence()}")
    text = "the full model's own text" if how.lossless else "lossy"
    options.console().print(table(found, f"{loaded.name}, {wanted.name}: {how.method} ({text})"))
    if json is not None:
        guarantee = engine.guarantee_of(how.method)
        write_json(
            json,
            {
                **provenance.collect(engine.decoder.info.device, backend=engine.backend),
                "model": loaded.name,
                "dtype": str(loaded.model.dtype).removeprefix("torch."),
                "weights": engine.weights,
                "mode": wanted.name,
                "method": how.method,
                "lossless": how.lossless,
                "quality": quality,
                "threshold": threshold,
                "guarantee": None if guarantee is None else guarantee.sentence(),
                "accelerator": None if wanted.name == FULL else str(_folder(engine)),
                "limit": limit,
                "data": None if data is None else str(data),
                **found.as_dict(),
            },
        )


def _folder(engine: Any) -> Path | None:
    """The folder of the accelerator in use."""
    folder: Path | None = engine.accelerators[engine.default].folder
    return folder
