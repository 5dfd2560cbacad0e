"""`multirate export`: an accelerator in the layout that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multirate.cli import options


def command(
    model: Annotated[
        str, typer.Argument(help="A model's folder, GGUF file, hub id or name.", show_default=False)
    ],
    accelerator: Annotated[
        str, typer.Option("--accelerator", "-a", help="Folder or hub id.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The checkpoint's folder.", show_default=False)],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")
    ] = False,
) -> None:
    """Write an accelerator as others of its method are published.

    eagle3: the layout of vLLM's speculators, config.json and model.safetensors.
    """
    from multirate.training.checkpoint import Accelerator, check_export

    check_export(out, overwrite)
    loaded = options.load(model, "auto", "cpu")
    Accelerator.from_pretrained(accelerator, loaded.model).export(out)
    typer.echo(str(out))
