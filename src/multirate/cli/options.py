"""Arguments that several commands share, and what they stand for."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multirate.errors import UserError

if TYPE_CHECKING:
    from multirate.engine import Engine
    from multirate.experts.runtime import ExpertRuntime
    from multirate.hub import LoadedModel

Model = Annotated[
    str | None,
    typer.Argument(
        help="A model's folder, GGUF file or hub id, or a name such as smollm2 (the default).",
        show_default=False,
    ),
]
Dtype = Annotated[str, typer.Option(help="auto (as saved), bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, cuda:1 …")]
Backend = Annotated[
    str, typer.Option(help="auto, hf (the model's own layers) or native (packed bf16 weights).")
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="CPU threads (default: as many as are fastest, measured while decoding).",
        show_default=False,
    ),
]
Speculate = Annotated[
    str,
    typer.Option(
        help="auto (plain decoding where drafts do not pay on this machine), always or never."
    ),
]


Mode = Annotated[
    str,
    typer.Option(
        help="lossless (the model's own text), or dynamic: tokens leave early, within the promise "
        "that multirate calibrate stored for --quality."
    ),
]
Quality = Annotated[
    float | None,
    typer.Option(
        help="With --mode dynamic: the share of tokens that are to be the full model's, such as "
        "0.99; 1 is lossless.",
        show_default=False,
    ),
]


Tuned = Annotated[
    bool,
    typer.Option(
        "--tuned/--no-tuned", help="Use the settings that multirate tune found for this machine."
    ),
]


def set_threads(threads: int | None) -> None:
    """Before any weights are packed: the packed decoder takes its threads from torch. None: as many
    as this process may use, fewer while these are faster.
    """
    if threads is None:
        import torch

        from multirate.model.machine import usable_processors

        torch.set_num_threads(min(torch.get_num_threads(), usable_processors()))
        return
    if threads < 1:
        raise UserError(f"--threads is {threads}: at least 1 is needed")
    most = 2 * (os.cpu_count() or 1)
    if threads > most:
        raise UserError(
            f"--threads is {threads}: this machine has {os.cpu_count()} processors, and at most "
            f"{most} are accepted"
        )
    import torch

    from multirate.model.native.library import use_all_threads

    torch.set_num_threads(threads)
    use_all_threads()


def threads_line(decoder: Any) -> str:
    """How many threads decode, and why they are fewer than they could be."""
    import torch

    running, most = decoder.threads, torch.get_num_threads()
    if running < most:
        return f"{running} of {most} threads (the fastest at the moment, beside other processes)"
    return f"{running} thread{'s' * (running > 1)}"


Experts = Annotated[
    Path | None,
    typer.Option(help="The model's expert store (multirate pack makes one).", show_default=False),
]
ExpertMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory for experts, such as 2GB (default: all of them).", show_default=False
    ),
]
ExpertPolicy = Annotated[
    str,
    typer.Option(
        help="aot, on_demand, lru, lrfu, least_stale, previous_token, popularity, next_layer_gate "
        "or accelerated."
    ),
]
ExpertPredictor = Annotated[
    Path | None,
    typer.Option(help="What train --objective experts made for this model.", show_default=False),
]


def keep_transformers_quiet() -> None:
    """It prints no bars beside our own lines."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def load(model: str | None, dtype: str, device: str, experts: Path | None = None) -> LoadedModel:
    """The model, its experts in a store if one is given."""
    from multirate.experts.load import load_offloaded
    from multirate.hub import load_model

    keep_transformers_quiet()
    if experts is None:
        return load_model(model, dtype, device)
    if model is None:
        raise UserError("--experts needs the MODEL that the store was packed from")
    if dtype != "auto":
        raise UserError(
            f"--dtype {dtype} with --experts: accepted is auto, the dtype that was packed"
        )
    return load_offloaded(model, experts, device)


def expert_line(runtime: ExpertRuntime) -> str:
    """What loading experts did, on a line."""
    seen = runtime.stats
    return (
        f"experts: {runtime.memory_bytes / 1e6:.0f} MB, hit rate {seen.hit_rate:.2f}, "
        f"{seen.recall:.2f} of the rest "
        f"read ahead, {seen.bytes / 1e6:.0f} MB read, waited {seen.stall_seconds:.2f} s"
    )


def add_accelerators(
    engine: Engine, given: Sequence[str], methods: Sequence[str], own: Mapping[str, Path]
) -> None:
    """`NAME=PATH` or `PATH` each, and those of the model's `own` accelerators that `methods`
    name.
    """
    for text in given:
        before = set(engine.accelerators)
        name, separator, path = text.partition("=")
        named = bool(separator) and not Path(text).exists()
        added = engine.add(path if named else text, name if named else None)
        if added in before:
            raise UserError(
                f"two accelerators are named {added}: name them apart, as in -a NAME=FOLDER"
            )
    from multirate.methods.spec import parse_variant

    bases = {parse_variant(method)[0] for method in methods}
    for name, folder in own.items():
        if name in bases and name not in engine.accelerators:
            engine.add(folder, name)


def note(text: str) -> None:
    """A line for the user that is not the output."""
    typer.echo(text, err=True)


def note_left_out(engine: Engine, by: str = "") -> None:
    """Says what of the model's generation_config is left out, where something is."""
    from multirate.decoding.generation_config import left_out

    said = left_out(getattr(engine.model, "generation_config", None), by)
    if said is not None:
        note(f"note: {said}")


def console(stderr: bool = False) -> Any:
    """A rich console, 80 columns wide when the terminal's width is unknown."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else 80)
