"""Adds a layer adapter's outputs to the model's own linears, for chosen rows, through temporary
forward hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from multirate.errors import UserError
from multirate.runtime.decoder import LayerAdapter
from multirate.runtime.hf.parts import LayerParts, Site


@contextmanager
def apply_adapter(
    layer: LayerParts, adapter: LayerAdapter, rows: Tensor | None = None
) -> Iterator[None]:
    """While active, a run of `layer` adds `adapter.deltas()` at their sites.

    rows: which of the layer's [B, T] rows get the deltas: a boolean mask [B, T], flat row numbers
    (int64, into B·T), or None for all. The others come out bit-identical. Keeps gradients; the
    hooks go also when the body raises. Other threads that run the layer meanwhile are not
    concerned. Raises UserError when the adapter names a site that this layer does not have.
    """
    deltas = adapter.deltas()
    missing = [name for name in deltas if name not in layer.sites]
    if missing:
        kind = (
            "a mixture-of-experts layer"
            if layer.moe is not None
            else f"a {type(layer.module).__name__}"
        )
        raise UserError(
            f"the adapter of layer {layer.index} adapts {missing[0]!r}, which {kind} does not "
            f"have; available: {', '.join(sorted(layer.sites))}"
        )
    index = (
        rows.reshape(-1).nonzero().squeeze(-1)
        if rows is not None and rows.dtype == torch.bool
        else rows
    )
    handles = []
    try:
        for name, delta in deltas.items():
            site = layer.sites[name]
            handles.append(site.module.register_forward_hook(_hook(site, delta, index)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(
    site: Site, delta: nn.Module, index: Tensor | None
) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
    ours = threading.get_ident()

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if threading.get_ident() != ours:
            return output
        if isinstance(
            output, tuple
        ):  # e.g. a MoE block returning its router scores beside the hidden states
            return (_added(inputs[0], output[0]), *output[1:])
        return _added(inputs[0], output)

    def _added(x: Tensor, y: Tensor) -> Tensor:
        if index is None:
            extra = delta(x).to(y.dtype)
            if site.start is None:
                return y + extra
            before, part, after = (
                y[..., : site.start],
                y[..., site.start : site.stop],
                y[..., site.stop :],
            )
            return torch.cat([before, part + extra, after], dim=-1)
        flat = y.reshape(-1, y.shape[-1])
        extra = delta(x.reshape(-1, x.shape[-1])[index]).to(y.dtype)
        if site.start is not None:
            extra = nn.functional.pad(extra, (site.start, y.shape[-1] - (site.stop or 0)))
        return flat.index_add(0, index, extra).view(y.shape)

    return hook
