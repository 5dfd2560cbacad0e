"""`multirate info`: shows what a model is, how it runs here, and its accelerators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multirate.cli import options

if TYPE_CHECKING:
    from multirate.engine import Engine
    from multirate.loading.hub import LoadedModel
    from multirate.runtime.decoder import DecoderInfo


def command(model: options.Model = None, *, loading: options.Loading) -> None:
    """Show what a model is, whether and how it runs on this machine, and its accelerators.

    With weights quantised on load, also what that costs: perplexity and best tokens on a few texts.
    """
    from multirate.engine import attach
    from multirate.errors import UserError
    from multirate.runtime.quantised import is_quantised

    loaded = loading.load(model)
    rows = _of_model(loaded)
    try:
        # a quantised model has no layers of its own to run
        backend = "auto" if is_quantised(loaded.model) else "hf"
        engine = attach(loaded, backend=backend)
    except UserError as unsupported:
        rows["supported"] = f"no: {unsupported}"
    else:
        rows |= _of_decoder(engine.decoder.info) | _here(engine, model, loading)
    _print(rows)


def _print(rows: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, str(value))
    options.console().print(table)


def _of_model(loaded: LoadedModel) -> dict[str, Any]:
    """What every model has, and the machine."""
    from multirate import provenance
    from multirate.runtime.quantised import device_of, formats_line, weight_bytes

    model = loaded.model
    here = provenance.collect(device_of(model))
    architectures = getattr(model.config, "architectures", None) or [type(model).__name__]
    return {
        "model": loaded.name,
        "architecture": architectures[0],
        "parameters": f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M",
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": f"{formats_line(model)} ({weight_bytes(model) / 1e6:.0f} MB)",
        "device": here["device"],
        "processor": f"{here['cpu']}, threads: {here['threads']}",
        "versions": f"multirate {here['version']}, torch {here['torch']}, "
        f"transformers {here['transformers']}",
    }


def _of_decoder(info: DecoderInfo) -> dict[str, Any]:
    """The shape of a model that can be decoded."""
    context = "unlimited" if info.max_positions is None else f"{info.max_positions} tokens"
    rows: dict[str, Any] = {
        "layers": f"{info.num_layers} of width {info.hidden_size}",
        "vocabulary": info.vocab_size,
        "context": context if info.claimed_positions is None else info.context,
    }
    windows = sorted({window for window in info.windows if window is not None})
    if windows:
        sliding = sum(window is not None for window in info.windows)
        rows["sliding window"] = f"{', '.join(map(str, windows))} tokens in {sliding} layers"
    if info.num_experts:
        rows["experts"] = f"{info.num_experts}, {info.experts_per_token} per token"
    return rows


def _here(engine: Engine, model: str | None, loading: options.Loading) -> dict[str, Any]:
    """How it runs on this machine, and with which methods."""
    from multirate.fidelity import DecoderReader, ModelReader, fidelity, fixed_texts
    from multirate.loading.hub import reference_accelerators
    from multirate.methods.spec import trainable
    from multirate.runtime.load import why_not_native
    from multirate.runtime.native.formats import instruction_set
    from multirate.runtime.quantised import ON_LOAD

    reason = why_not_native(engine.model)
    native = f"native (the C kernel, {instruction_set()})"
    rows: dict[str, Any] = {
        "supported": "yes",
        "backend": native if reason is None else f"hf (the layers of transformers): {reason}",
    }
    if loading.weights in ON_LOAD:
        full = ModelReader(options.load(model, loading.dtype, loading.device).model)
        texts = fixed_texts(engine.tokenizer, engine.decoder.info.max_positions)
        rows["cost of weights"] = fidelity(full, DecoderReader(engine.decoder), texts)
    rows["untrained methods"] = ", ".join(engine.methods())
    rows["trainable methods"] = ", ".join(trainable())
    if accelerators := reference_accelerators(model):
        rows["accelerators"] = ", ".join(accelerators)
        rows["model cards"] = next(iter(accelerators.values())).parent / "*" / "README.md"
    return rows
