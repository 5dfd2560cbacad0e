"""`multirate export`: saves an accelerator in a layout that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multirate.cli import options


def command(
    model: options.SourceModel,
    accelerator: Annotated[str, typer.Option("--accelerator", "-a", help="Its folder or hub id.")],
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing checkpoint.")
    ] = False,
) -> None:
    """Save an accelerator in the layout that its method is usually published in.

    Works for eagle3: config.json and model.safetensors in the layout of vLLM's speculators.
    """
    from multirate.training.checkpoint import Accelerator, check_export

    check_export(out, overwrite)
    loaded = options.load(model, "auto", "cpu")
    Accelerator.from_pretrained(accelerator, loaded.model).export(out)
    typer.echo(str(out))
