"""`multirate quantize`: writes a model as a GGUF file with quantised weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multirate.cli import options

if TYPE_CHECKING:
    from multirate.loading.gguf.file import GgufFile


def command(
    model: options.SourceModel,
    out: Annotated[Path, typer.Argument(help="The GGUF file to write.")],
    type: Annotated[
        str,
        typer.Option(
            help="What matrices become: q8_0, q4_1, q4_0, bf16 or f16. With 4 bits, embeddings and "
            "the output layer keep 8."
        ),
    ] = "q8_0",
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Compare the result with the model on a few texts: perplexity and best tokens.",
        ),
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    threads: options.Threads = None,
) -> None:
    """Write a model as a GGUF file with quantised weights, which llama.cpp reads as well.

    A GGUF file can be quantised again: its tokenizer and its other fields are kept. The file
    appears when it is complete.
    """
    options.set_threads(threads)

    from multirate.cli.progress import Bar
    from multirate.errors import say_once
    from multirate.loading.gguf.file import GgufFile
    from multirate.loading.gguf.writing.tensors import quantised_kinds
    from multirate.loading.gguf.writing.write import (
        check_output,
        check_type,
        requantise,
        write_model,
    )
    from multirate.loading.hub import gguf_file

    check_type(type)
    source = gguf_file(model)
    check_output(out, source, force)
    file = loaded = None
    if source is not None:
        file = GgufFile(source)
        if kinds := quantised_kinds(file):
            say_once(
                f"{source.name} is quantised already ({', '.join(kinds)}): quantising it again "
                "adds to its error"
            )
    else:
        loaded = options.load(model, "auto", "cpu")
    with Bar("writing tensors") as bar:
        if file is not None:
            requantise(file, out, type, bar.to)
        else:
            assert loaded is not None
            write_model(loaded.model, loaded.tokenizer, model, out, type, bar.to)
    typer.echo(f"{out}: {out.stat().st_size / 1e6:,.1f} MB")
    if check:
        typer.echo(str(_fidelity(file, None if loaded is None else loaded.model, out)))


def _fidelity(file: GgufFile | None, model: Any, out: Path) -> Any:
    """How the written file compares with the GGUF file or model that it was made from. Both run
    with dequantised weights: in float32, or in bfloat16 where memory is short.
    """
    import psutil
    import torch

    from multirate.fidelity import ModelReader, fidelity, fixed_texts
    from multirate.loading.gguf.file import GgufFile
    from multirate.loading.gguf.load import load_gguf

    values = sum(math.prod(tensor.shape) for tensor in GgufFile(out).tensors.values())
    roomy = 2 * 4 * values < psutil.virtual_memory().available / 2
    dtype = torch.float32 if roomy else torch.bfloat16
    quantised, tokenizer = load_gguf(out, dtype)
    full = model.to(dtype) if file is None else load_gguf(file.path, dtype)[0]
    texts = fixed_texts(tokenizer, quantised.config.max_position_embeddings)
    return fidelity(ModelReader(full), ModelReader(quantised), texts)
