"""`multirate train`: an accelerator for a model, from text files."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer

from multirate.cli import options
from multirate.cli.errors import INTERRUPTED
from multirate.errors import UserError
from multirate.training.settings import TrainSettings


def _with_settings(function: Callable[..., None]) -> Callable[..., None]:
    """Adds every field of TrainSettings as an option, so that none can be forgotten here."""
    hints = get_type_hints(TrainSettings)
    own = inspect.signature(function, eval_str=True)
    parameters = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    for field in fields(TrainSettings):
        hint: Any = hints[field.name]
        default: Any = field.default if field.default is not MISSING else None
        if get_origin(hint) is tuple:
            hint, default = list[get_args(hint)[0]] | None, None  # type: ignore[misc]
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[
                    hint, typer.Option(help=_HELP.get(field.name), show_default=default is not None)
                ],
            )
        )
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function


_HELP = {
    "steps": "Optimizer steps.",
    "tokens_per_batch": "Padded tokens of one forward pass of one process.",
    "max_length": "Samples are cut to this many tokens.",
    "gradient_accumulation": "Forward passes per optimizer step.",
    "lr": "Peak learning rate.",
    "head_lr": "Share of the rate that a draft head of the method's own has.",
    "final_lr": "Share of the peak rate at the end of the cosine.",
    "step_decay": "Loss weight of draft step s is this to the power s - 1.",
    "heldout_files": "Evaluated at the end (repeatable; default: a part of the data is set aside).",
    "heldout_samples": "At most this many samples are evaluated.",
    "checkpoint_seconds": "Time between checkpoints.",
    "checkpoint_steps": "Also write a checkpoint every this many steps.",
    "precision": "auto: bf16 where the hardware multiplies it, fp32 elsewhere.",
    "sharpness": "Distil at softmax(sharpness x logits); above 1 favours greedy drafts.",
    "teacher_states": "Folder to keep the base's final residuals in: each sample runs through the "
    "base once.",
    "start_from": "A trained accelerator's folder to go on from, with other data or settings.",
    "compile": "Compile the base's layers (pays on long runs).",
    "overwrite": "Replace a finished accelerator in the output folder.",
}


@_with_settings
def command(
    model: Annotated[
        str,
        typer.Argument(
            help="The base model's folder, GGUF file, hub id or name; it is never changed."
        ),
    ],
    more_data: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="More data files.", show_default=False),
    ] = None,
    *,
    data: Annotated[
        list[Path], typer.Option(help="JSON or JSONL to train on (repeatable).", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The accelerator's folder.", show_default=False)],
    method: Annotated[
        str | None,
        typer.Option(
            help="A trained method (multirate info lists them).", show_default="the recommended one"
        ),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(help="tokens (drafts), or experts: name a mixture's experts ahead of time."),
    ] = "tokens",
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE of the method's config, such as gates=[2] (repeatable).",
            show_default=False,
        ),
    ] = None,
    threads: options.Threads = None,
    **settings: Any,
) -> None:
    """Train an accelerator beside a frozen model. Interrupted, the same command resumes."""
    chosen = {
        name: tuple(value or ()) if name == "heldout_files" else value
        for name, value in settings.items()
    }
    checked = TrainSettings(**cast(Any, chosen))
    if objective not in ("tokens", "experts"):
        raise UserError(f"--objective is {objective!r}; accepted: tokens or experts")
    options.set_threads(threads)

    from multirate.methods.spec import parse_settings, recommended
    from multirate.training.loop import train

    method_options = parse_settings(option or [], "--option")
    options.keep_transformers_quiet()
    if objective == "experts":
        method = recommended("experts")
    result = train(model, [*data, *(more_data or [])], out, method, checked, method_options)
    if not result.finished:
        options.note(f"interrupted after step {result.steps}: the same command resumes")
        raise typer.Exit(INTERRUPTED)
    typer.echo(f"{result.directory}")
