"""Whether the kernel can run a model: its shapes, its modules, and the room for packed weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from multirate.errors import UserError
from multirate.runtime.decoder import NotPlain
from multirate.runtime.hf.inspect import find_parts, ropes
from multirate.runtime.machine import free_memory
from multirate.runtime.native import library
from multirate.runtime.native.families import Family, head_dim
from multirate.runtime.native.packing import packed_bytes
from multirate.runtime.native.plain import unknown_part
from multirate.runtime.quantised import is_quantised, weight_bytes


def cannot_run(config: Any, model: nn.Module, family: Family) -> str | None:
    """What of a known family's configuration the kernel cannot run; None: nothing."""
    parameter = next(model.parameters())
    if parameter.is_meta and not is_quantised(model):
        return NotPlain("its weights are offloaded")
    if parameter.device.type not in ("cpu", "meta") or parameter.dtype != torch.bfloat16:
        return (
            f"the native kernel runs bfloat16 on CPU, not {parameter.dtype} on {parameter.device}"
        )
    d, dim = config.hidden_size, head_dim(config)
    if d % 64 or config.intermediate_size % 32 or dim % 16 or dim > 256:
        return (
            f"hidden size {d}, intermediate size {config.intermediate_size} or head size "
            f"{dim} is not a multiple of the kernel's tile size"
        )
    if (config.num_attention_heads * dim) % 64 or (2 * config.num_key_value_heads * dim) % 64:
        return "the query, key and value widths are not multiples of the kernel's tile size"
    if getattr(config, "mlp_bias", False):
        return "the native kernel does not support biases in the MLP's projections"
    for rope in ropes(config):
        if family.changes_with_length(rope):
            return f"rotary type {rope.get('rope_type')} changes with the length"
    try:
        unknown = unknown_part(find_parts(model), family)
    except UserError as reason:  # no backend can run it
        return str(reason)
    if unknown is not None:
        return unknown
    try:
        library.kernel()
    except library.NativeUnavailable as problem:
        return str(problem)
    return None


def too_large(model: nn.Module) -> str | None:
    """Whether there is no room for packed weights beside the model's own."""
    free = free_memory()
    if is_quantised(model):
        needed = weight_bytes(model)
        if free is not None and needed > free:  # to expand them would need more still
            raise UserError(
                f"the model does not fit into memory: packing its weights needs {needed / 1e9:.1f} "
                f"GB, but only {free / 1e9:.1f} GB are free"
            )
        return None
    head = model.get_output_embeddings()  # type: ignore[operator]
    needed = packed_bytes(sum(p.numel() for p in model.parameters()), head.weight.numel())
    if free is None or needed <= free:
        return None
    return NotPlain(
        f"packing its weights needs {needed / 1000000000.0:.1f} GB of memory, but only "
        f"{free / 1000000000.0:.1f} GB are free"
    )


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model in `model`, which may also have an image encoder."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
