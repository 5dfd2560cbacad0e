"""Options that several commands share, and the code behind them."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multirate.cli import help
from multirate.errors import UserError

if TYPE_CHECKING:
    from multirate.engine import Engine
    from multirate.experts.runtime import ExpertRuntime
    from multirate.loading.hub import LoadedModel

measured, sampling, written, advanced, dynamic, of_experts, of_machine = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in (
        help.MEASURED,
        help.SAMPLING,
        help.TEXT,
        help.ADVANCED,
        help.DYNAMIC,
        help.EXPERTS,
        help.MACHINE,
    )
)
"""Options of a group of the help page."""
Model = Annotated[
    str | None,
    typer.Argument(help="A folder, GGUF file, hub id, or a name such as smollm2 (the default)."),
]
BaseModel = Annotated[
    str, typer.Argument(help="The base model: a folder, GGUF file, hub id or name.")
]
SourceModel = Annotated[str, typer.Argument(help="A folder, GGUF file, hub id or name.")]
Accelerator = Annotated[
    str | None,
    typer.Option("--accelerator", "-a", help="A trained accelerator: its folder or hub id."),
]
MaxNewTokens = Annotated[
    int,
    typer.Option("--max-new-tokens", "-n", min=1, help="Maximum number of tokens per answer."),
]
Stop = Annotated[list[str] | None, written(help="Stop at this text (repeatable).")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")]
Dtype = Annotated[str, of_machine(help="auto (as saved), bfloat16, float16 or float32.")]
Weights = Annotated[
    str,
    of_machine(
        help="file (as in the file: GGUF formats run as they are), bf16 (a GGUF file expanded), or "
        "q8_0, q4_0, q4_1 (any other model quantised as it is loaded)."
    ),
]
Device = Annotated[
    str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:1, cuda:2 …")
]
Backend = Annotated[
    str,
    of_machine(help="auto, native (the C kernel, CPU only) or hf (the layers of transformers)."),
]
Threads = Annotated[
    int | None,
    of_machine(help="CPU threads (default: the fastest number, measured while decoding)."),
]
Speculate = Annotated[
    str, advanced(help="When to draft: auto (only where it is faster), always or never.")
]
Mode = Annotated[
    str,
    dynamic(
        help="lossless (the model's own text) or dynamic (some tokens skip layers, within the "
        "quality target that multirate calibrate stored)."
    ),
]
Quality = Annotated[
    float | None,
    dynamic(
        help="Quality target for --mode dynamic: the share of tokens that must match the full "
        "model's, such as 0.99. 1 is lossless."
    ),
]
Tuned = Annotated[
    bool,
    advanced(
        "--tuned/--no-tuned", help="Use the settings that multirate tune found for this machine."
    ),
]
Experts = Annotated[
    Path | None, of_experts(help="The model's expert store, made with multirate pack.")
]
ExpertMemory = Annotated[
    str | None, of_experts(help="Memory for experts, such as 2GB (default: enough for all).")
]
ExpertPolicy = Annotated[
    str,
    of_experts(
        help="Which experts to load and keep: aot, on_demand, lru, lrfu, least_stale, "
        "previous_token, popularity, next_layer_gate or accelerated."
    ),
]
ExpertPredictor = Annotated[
    Path | None, of_experts(help="A predictor made with multirate train --objective experts.")
]


@dataclass(frozen=True)
class Loading:
    dtype: Dtype = "auto"
    weights: Weights = "file"
    device: Device = "auto"
    threads: Threads = None

    def load(self, model: str | None, experts: Path | None = None) -> LoadedModel:
        """Loads the model, with its experts in a store if one is given."""
        set_threads(self.threads)
        return load(model, self.dtype, self.device, experts, self.weights)


@dataclass(frozen=True)
class Machine(Loading):
    backend: Backend = "auto"

    def attach(self, model: str | None) -> tuple[LoadedModel, Engine]:
        from multirate.engine import attach

        loaded = self.load(model)
        return loaded, attach(loaded, backend=self.backend)


def check_ray() -> None:
    """UserError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("--ray needs ray: run pip install 'multirate[ray]'")


def set_threads(threads: int | None) -> None:
    """Sets the number of threads. Call it before any weights are packed, because the packed decoder
    takes its threads from torch. None: as many as this process may use, or fewer where that is
    faster.
    """
    if threads is None:
        import torch

        from multirate.runtime.machine import usable_processors

        torch.set_num_threads(min(torch.get_num_threads(), usable_processors()))
        return
    if threads < 1:
        raise UserError(f"--threads is {threads}: at least 1 is needed")
    most = 2 * (os.cpu_count() or 1)
    if threads > most:
        raise UserError(
            f"--threads is {threads}: the maximum is {most}, twice this machine's "
            f"{os.cpu_count()} processors"
        )
    import torch

    from multirate.runtime.native.library import use_all_threads

    torch.set_num_threads(threads)
    use_all_threads()


def threads_line(decoder: Any) -> str:
    """How many threads decode, and why not more."""
    import torch

    running, most = decoder.threads, torch.get_num_threads()
    if running < most:
        return f"{running} of {most} threads (currently the fastest number)"
    return f"{running} thread{'s' * (running > 1)}"


def keep_transformers_quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def load(
    model: str | None,
    dtype: str,
    device: str,
    experts: Path | None = None,
    weights: str = "file",
) -> LoadedModel:
    """Loads the model, with its experts in a store if one is given."""
    from multirate.experts.load import load_offloaded
    from multirate.loading.hub import load_model

    keep_transformers_quiet()
    if experts is None:
        return load_model(model, dtype, device, weights)
    if model is None:
        raise UserError("--experts needs MODEL, the model that the store was packed from")
    if dtype != "auto":
        raise UserError(
            f"--dtype {dtype} does not work with --experts: use auto, the dtype of the store"
        )
    if weights != "file":
        raise UserError(
            f"--weights {weights} does not work with --experts: use file, the weights of the store"
        )
    return load_offloaded(model, experts, device)


def expert_line(runtime: ExpertRuntime) -> str:
    """What loading experts did, in one line."""
    seen = runtime.stats
    return (
        f"experts: {runtime.memory_bytes / 1e6:.0f} MB of memory in "
        f"{runtime.store.index.record.weights}, {100 * seen.hit_rate:.0f}% found "
        f"in memory, {100 * seen.recall:.0f}% of the others prefetched, "
        f"{seen.bytes / 1e6:.0f} MB read, {seen.stall_seconds:.2f} s waiting for reads"
    )


def add_accelerators(
    engine: Engine, given: Sequence[str], methods: Sequence[str], own: Mapping[str, Path]
) -> None:
    """Adds the given accelerators (`NAME=PATH` or `PATH`), and those of the model's `own` that
    `methods` name.
    """
    for text in given:
        before = set(engine.accelerators)
        name, separator, path = text.partition("=")
        named = bool(separator) and not Path(text).exists()
        added = engine.add(path if named else text, name if named else None)
        if added in before:
            raise UserError(
                f"two accelerators are named {added}: give each a name, as in -a NAME=FOLDER"
            )
    from multirate.methods.spec import parse_variant

    bases = {parse_variant(method)[0] for method in methods}
    for name, folder in own.items():
        if name in bases and name not in engine.accelerators:
            engine.add(folder, name)


def add_accelerator(
    engine: Engine, model: str | None, accelerator: str | None, method: str | None = None
) -> None:
    """Adds the given accelerator, and the model's own one of the method; without both, the model's
    own one of the default method.
    """
    from multirate.loading.hub import reference_accelerators
    from multirate.methods.spec import recommended

    wanted = [method or recommended()] if method or not accelerator else []
    given = [accelerator] if accelerator else []
    add_accelerators(engine, given, wanted, reference_accelerators(model))


def prompt_ids(tokenizer: Any, text: str, raw: bool = False) -> list[int]:
    """Token ids of a user's prompt. raw: without the chat template."""
    from multirate.loading.chat_template import encode_chat

    asked = [{"role": "user", "content": text}]
    ids = tokenizer(text)["input_ids"] if raw else encode_chat(tokenizer, asked)
    if not ids:
        raise UserError("the prompt has no tokens: give some text")
    return list(ids)


def check_json(path: Path | None) -> None:
    """UserError for a file of results that cannot be written, or is not ours."""
    from multirate import provenance
    from multirate.io import check_writable

    if path is not None:
        check_writable(path, provenance.RESULTS, provenance.collected)


def note(text: str) -> None:
    """Prints a line to stderr."""
    typer.echo(text, err=True)


def note_left_out(engine: Engine, by: str = "") -> None:
    """Prints which settings of the model's generation_config are ignored, if any."""
    from multirate.decoding.generation_config import left_out

    said = left_out(getattr(engine.model, "generation_config", None), by)
    if said is not None:
        note(f"note: {said}")


def console(stderr: bool = False) -> Any:
    """A rich console, 80 columns wide if the terminal's width is unknown."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else 80)
