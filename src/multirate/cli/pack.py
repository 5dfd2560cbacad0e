"""`multirate pack`: a mixture-of-experts checkpoint's experts, as a store to read them from while
generating.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    model: Annotated[
        str, typer.Argument(help="A model's folder, GGUF file, hub id or name.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The store's folder.", show_default=False)],
    layout: Annotated[
        str,
        typer.Option(
            help="auto, native (as the kernel reads weights) or module (as transformers does)."
        ),
    ] = "auto",
    force: Annotated[
        bool, typer.Option("--force", help="Replace the store of another model or revision.")
    ] = False,
) -> None:
    """Pack a model's experts into a store that generation reads them from, for models larger than
    memory.

    Works from the checkpoint's files, one expert in memory at a time. Interrupted, the same command
    goes on.
    """
    from multirate.cli.progress import Bar
    from multirate.experts.pack import pack
    from multirate.hub import model_folder

    folder = model_folder(model)
    with Bar("packing experts") as bar:
        name = folder.name if Path(model).exists() else model
        index = pack(folder, out, name, on_expert=bar.to, force=force, layout=layout)
    from multirate.bench.expert_report import size

    record = index.record.bytes
    typer.echo(
        f"{out}: {len(index.layers)} layers of {index.num_experts} experts, {size(record)} each, "
        f"{size(index.data_bytes)} in all. A token needs {index.top_k} of each layer: "
        f"{size(len(index.layers) * index.top_k * record)}. The least memory is "
        f"{size((index.top_k + 1) * record)}."
    )
