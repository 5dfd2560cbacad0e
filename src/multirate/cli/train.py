"""`multirate train`: trains an accelerator for a model on text files."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer

from multirate.cli import help, options
from multirate.cli.errors import INTERRUPTED
from multirate.errors import UserError
from multirate.training.settings import TrainSettings


def _with_settings(function: Callable[..., None]) -> Callable[..., None]:
    """Adds every field of TrainSettings as an option."""
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
                    hint,
                    typer.Option(
                        help=_HELP.get(field.name),
                        show_default=default is not None,
                        rich_help_panel=_PANELS.get(field.name),
                    ),
                ],
            )
        )
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function


_HELP = {
    "steps": "Number of optimizer steps.",
    "tokens_per_batch": "Tokens per forward pass and process, padding included.",
    "max_length": "Maximum number of tokens per sample; longer samples are cut.",
    "gradient_accumulation": "Forward passes per optimizer step.",
    "lr": "Peak learning rate.",
    "warmup_steps": "Steps until the learning rate reaches its peak.",
    "seed": "Random seed.",
    "heldout_files": "Data for the final evaluation (repeatable; default: part of --data).",
    "heldout_samples": "Maximum number of samples to evaluate.",
    "checkpoint_steps": "Also write a checkpoint after this many steps.",
    "log_every": "Steps between progress lines.",
    "precision": "auto, bf16 or fp32. auto: bf16 if the hardware supports it.",
    "teacher_states": "Keep the base model's outputs in this folder, so that each sample runs "
    "through it only once.",
    "start_from": "Continue from this trained accelerator, with other data or settings.",
    "compile": "Compile the base model's layers (worth it on long runs).",
    "overwrite": "Replace a finished accelerator in the output folder.",
}
_PANELS = {
    **dict.fromkeys(
        (
            "lr",
            "warmup_steps",
            "gradient_accumulation",
            "seed",
        ),
        help.OPTIMIZER,
    ),
    **dict.fromkeys(
        (
            "max_length",
            "heldout_files",
            "heldout_samples",
            "checkpoint_steps",
            "log_every",
            "teacher_states",
        ),
        help.FILES,
    ),
    **dict.fromkeys(("tokens_per_batch", "precision", "compile"), help.MACHINE),
}


@_with_settings
def command(
    model: Annotated[
        str,
        typer.Argument(
            help="The base model: a folder, GGUF file, hub id or name. It stays unchanged."
        ),
    ],
    more_data: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="More data files.")
    ] = None,
    *,
    data: Annotated[list[Path], typer.Option(help="JSON or JSONL file to train on (repeatable).")],
    out: Annotated[Path, typer.Option(help="Folder for the accelerator.")],
    method: Annotated[
        str | None,
        typer.Option(
            help="Which method to train (default: m2r2-carry; multirate info lists them)."
        ),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(help="tokens: draft text. experts: predict which experts a mixture needs."),
    ] = "tokens",
    option: Annotated[
        list[str] | None,
        typer.Option(help="A setting of the method, NAME=VALUE, such as gates=[2] (repeatable)."),
    ] = None,
    threads: options.Threads = None,
    **settings: Any,
) -> None:
    """Train an accelerator for a model. The model itself is not changed.

    After an interruption, run the same command again to resume.
    """
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
        options.note(f"interrupted after step {result.steps}: run the same command to resume")
        raise typer.Exit(INTERRUPTED)
    typer.echo(f"{result.directory}")
