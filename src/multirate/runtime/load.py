"""Chooses the decoder that runs a model: the native kernel if it knows every part, else the model's
own layers.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from multirate.errors import Notice, UserError, say_once
from multirate.runtime.cuda.decoder import GraphedDecoder
from multirate.runtime.decoder import Decoder, NotPlain
from multirate.runtime.finite import check_weights
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.native import library
from multirate.runtime.native.decoder import NativeDecoder, OtherLogits
from multirate.runtime.quantised import device_of, expanded, is_quantised, quantised_copy

BACKENDS = ("auto", "hf", "native")


def why_not_native(model: nn.Module) -> str | None:
    """Why backend "auto" runs the model's own layers; None: it packs its weights for the native
    kernel.
    """
    return NativeDecoder.supports(model)


def load_decoder(model: nn.Module, backend: str = "auto") -> Decoder:
    """The decoder that runs `model`.

    backend: "native" (packed weights, the C kernel), "hf" (the model's own layers; CUDA graphs on a
    GPU), or "auto": native if that supports the model. With "auto" a warning says if the kernel
    should run the model but cannot. Raises UserError with the reason for a model or backend that
    cannot be used.
    """
    if backend not in BACKENDS:
        raise UserError(f"backend={backend!r} is unknown; accepted: {', '.join(BACKENDS)}")
    check_weights(model)
    reason: str | None = None
    if backend != "hf":
        reason = why_not_native(model)
        if reason is None:
            try:
                return NativeDecoder(model)
            except OtherLogits as other:
                reason = NotPlain(str(other))
        if backend == "native":
            raise UserError(
                f"backend='native' cannot run this model: {reason}; use backend='hf' or 'auto'"
            )
    device = device_of(model)
    if is_quantised(model):
        why = "backend 'hf' was asked for" if backend == "hf" else reason
        if backend != "hf":
            library.say_unavailable(str(reason))
        say_once(f"expanding the quantised weights to bfloat16: {why}")
        return own_layers_decoder(device)(expanded(model))
    decoder = own_layers_decoder(device)(model)
    if backend != "hf":
        library.say_unavailable(str(reason))
        if isinstance(reason, NotPlain):
            warnings.warn(
                f"running the model's own layers instead of packed weights: {reason}",
                Notice,
                stacklevel=3,
            )
    return decoder


def quantised_for_kernel(model: Any, weights: str) -> Any:
    """A quantised copy of a model (see `quantised_copy`). UserError where the kernel cannot run
    it.
    """
    twin = quantised_copy(model, weights)
    reason = why_not_native(twin)
    if reason is not None:
        raise UserError(
            f"weights {weights} need the native kernel, which cannot run this model: {reason}"
        )
    return twin


def own_layers_decoder(device: torch.device) -> type[HFDecoder]:
    """What calls the model's own layers on this device: on CUDA they are captured and replayed."""
    return GraphedDecoder if device.type == "cuda" else HFDecoder
