"""`multirate info`: shows what a model is, how it runs here, and its accelerators."""

from __future__ import annotations

from typing import Any

from multirate.cli import options


def command(
    model: options.Model = None,
    dtype: options.Dtype = "auto",
    weights: options.Weights = "file",
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """Show what a model is, whether and how it runs on this machine, and its accelerators.

    With weights quantised on load, also what that costs: perplexity and best tokens on a few texts.
    """
    options.set_threads(threads)

    from rich.table import Table

    from multirate import provenance
    from multirate.engine import attach
    from multirate.errors import UserError
    from multirate.fidelity import DecoderReader, ModelReader, fidelity, fixed_texts
    from multirate.loading.hub import reference_accelerators
    from multirate.methods.spec import trainable
    from multirate.runtime.load import why_not_native
    from multirate.runtime.native.formats import instruction_set
    from multirate.runtime.quantised import (
        ON_LOAD,
        device_of,
        formats_line,
        is_quantised,
        weight_bytes,
    )

    loaded = options.load(model, dtype, device, weights=weights)
    here = provenance.collect(device_of(loaded.model))
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def row(name: str, value: Any) -> None:
        table.add_row(name, str(value))

    config = loaded.model.config
    row("model", loaded.name)
    row(
        "architecture", (getattr(config, "architectures", None) or [type(loaded.model).__name__])[0]
    )
    row("parameters", f"{sum(p.numel() for p in loaded.model.parameters()) / 1e6:.1f}M")
    row("dtype", str(loaded.model.dtype).removeprefix("torch."))
    row("weights", f"{formats_line(loaded.model)} ({weight_bytes(loaded.model) / 1e6:.0f} MB)")
    row("device", here["device"])
    row("processor", f"{here['cpu']}, threads: {here['threads']}")
    row(
        "versions",
        f"multirate {here['version']}, torch {here['torch']}, transformers {here['transformers']}",
    )
    try:
        # a quantised model has no layers of its own to run
        backend = "auto" if is_quantised(loaded.model) else "hf"
        engine = attach(loaded.model, backend=backend, tokenizer=loaded.tokenizer)
    except UserError as unsupported:
        row("supported", f"no: {unsupported}")
        options.console().print(table)
        return
    info = engine.decoder.info
    row("layers", f"{info.num_layers} of width {info.hidden_size}")
    row("vocabulary", info.vocab_size)
    context = "unlimited" if info.max_positions is None else f"{info.max_positions} tokens"
    row("context", context if info.claimed_positions is None else info.context)
    windows = sorted({window for window in info.windows if window is not None})
    if windows:
        sliding = sum(window is not None for window in info.windows)
        row("sliding window", f"{', '.join(map(str, windows))} tokens in {sliding} layers")
    if info.num_experts:
        row("experts", f"{info.num_experts}, {info.experts_per_token} per token")
    row("supported", "yes")
    reason = why_not_native(loaded.model)
    row(
        "backend",
        f"native (the C kernel, {instruction_set()})"
        if reason is None
        else f"hf (the layers of transformers): {reason}",
    )
    if weights in ON_LOAD:
        full = ModelReader(options.load(model, dtype, device).model)
        texts = fixed_texts(loaded.tokenizer, info.max_positions)
        row("cost of weights", fidelity(full, DecoderReader(engine.decoder), texts))
    row("untrained methods", ", ".join(engine.methods()))
    row("trainable methods", ", ".join(trainable()))
    if accelerators := reference_accelerators(model):
        row("accelerators", ", ".join(accelerators))
        row("model cards", next(iter(accelerators.values())).parent / "*" / "README.md")
    options.console().print(table)
