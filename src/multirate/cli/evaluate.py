"""`multirate eval`: scores a model on tasks with lm-evaluation-harness."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multirate.cli import options
from multirate.errors import UserError

if TYPE_CHECKING:
    from multirate.engine import Engine
    from multirate.lab.evaluation.modes import Decoding


@dataclass(frozen=True)
class Asked:
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: wikisql, e2e_nlg, dialogsum, a task of lm-eval, or a task's "
            "YAML file."
        ),
    ] = None
    data: Annotated[
        Path | None, typer.Option(help="Folder of the tasks' data (default: $MULTIRATE_EVAL_DATA).")
    ] = None
    limit: Annotated[
        int | None, typer.Option(help="Number of documents per task (default: all).")
    ] = None
    shots: Annotated[
        int | None,
        typer.Option(help="Number of examples in each prompt (default: the task's own)."),
    ] = None

    def load(self) -> dict[str, Any]:
        """The tasks by name. UserError for unknown tasks, and without lm-eval."""
        from multirate.lab.evaluation.installed import check_installed
        from multirate.lab.evaluation.task_files import load_tasks, task_names

        names = task_names(self.tasks or "")
        for option, value, least in (("--limit", self.limit, 1), ("--shots", self.shots, 0)):
            if value is not None and value < least:
                raise UserError(f"{option} is {value}: at least {least} is needed")
        check_installed()
        return load_tasks(names, self.data, self.shots)


def command(
    model: options.Model = None,
    *,
    asked: Asked,
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
    raw: Annotated[bool, typer.Option("--raw", help="Do not use the chat template.")] = False,
    speculate: options.Speculate = "auto",
    json: options.Json = None,
    machine: options.Machine,
) -> None:
    """Score a model on text to SQL, data to text, summaries, or any task of lm-eval."""
    from multirate.cli.progress import Bar
    from multirate.engine import SPECULATE
    from multirate.io import write_json
    from multirate.lab.evaluation.modes import FULL, SPECULATIVE, Mode, decoding
    from multirate.lab.evaluation.run import evaluate, table

    wanted = Mode(mode or (FULL if accelerator is None else SPECULATIVE), quality, threshold)
    if speculate not in SPECULATE:
        raise UserError(f"--speculate is {speculate!r}; accepted: {', '.join(SPECULATE)}")
    options.check_json(json)
    tasks = asked.load()
    loaded, engine = machine.attach(model)
    if wanted.name == FULL:
        if accelerator is not None:
            options.note(f"note: mode {FULL} does not use --accelerator {accelerator}")
    else:
        options.add_accelerator(engine, model, accelerator)
    how = decoding(engine, wanted, speculate)
    with Bar("evaluating") as bar:
        found = evaluate(engine, how, tasks, asked.limit, chat=not raw, progress=bar.to)
    if engine.guarantee is not None:
        options.note(f"note: {engine.guarantee.sentence()}")
    text = "the full model's own text" if how.lossless else "lossy"
    options.console().print(table(found, f"{loaded.name}, {wanted.name}: {how.method} ({text})"))
    if json is not None:
        settings = {
            "model": loaded.name,
            "mode": wanted.name,
            "quality": quality,
            "threshold": threshold,
            "limit": asked.limit,
            "data": None if asked.data is None else str(asked.data),
        }
        write_json(
            json, {**_about(engine, how, wanted.name == FULL), **settings, **found.as_dict()}
        )


def _about(engine: Engine, how: Decoding, full: bool) -> dict[str, Any]:
    """How the scored answers were decoded. full: without the accelerator."""
    from multirate import provenance

    guarantee = engine.guarantee_of(how.method)
    return {
        **provenance.collect(engine.decoder.info.device, backend=engine.backend),
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "weights": engine.weights,
        "method": how.method,
        "lossless": how.lossless,
        "guarantee": None if guarantee is None else guarantee.sentence(),
        "accelerator": None if full else str(engine.accelerators[engine.default].folder),
    }
