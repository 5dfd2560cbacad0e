"""`multirate pack`: packs the experts of a mixture-of-experts model into a store on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multirate.cli import options


def command(
    model: options.SourceModel,
    out: Annotated[Path, typer.Option(help="Folder for the store.")],
    layout: Annotated[
        str, typer.Option(help="auto, native (for the C kernel) or module (for transformers).")
    ] = "auto",
    weights: Annotated[
        str,
        typer.Option(
            help="The experts' weights: file (as they are), bf16 (a GGUF file expanded), or q8_0, "
            "q4_0, q4_1."
        ),
    ] = "file",
    force: Annotated[
        bool, typer.Option("--force", help="Replace a store of another model or revision.")
    ] = False,
) -> None:
    """Pack a model's experts into a store on disk, to run models that are larger than memory.

    Holds only one expert in memory at a time. After an interruption, run the same command again to
    continue.
    """
    from multirate.cli.progress import Bar
    from multirate.experts.pack import pack
    from multirate.loading.hub import model_files

    files = model_files(model)
    with Bar("packing experts") as bar:
        name = files.name if Path(model).exists() else model
        index = pack(
            files, out, name, on_expert=bar.to, force=force, layout=layout, weights=weights
        )
    from multirate.lab.bench.expert_report import size

    record = index.record.bytes
    typer.echo(
        f"{out}: {len(index.layers)} layers of {index.num_experts} experts in "
        f"{index.record.weights}, {size(record)} each, "
        f"{size(index.data_bytes)} in total. Each token uses {index.top_k} experts per layer, "
        f"{size(len(index.layers) * index.top_k * record)} in total. --expert-memory must be at "
        f"least {size((index.top_k + 1) * record)}."
    )
