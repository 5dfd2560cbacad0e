"""Chooses the decoder that runs a model: the native kernel if it knows every part, else the model's
own layers.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from multirate.errors import Notice, UserError
from multirate.model.cuda.decoder import GraphedDecoder
from multirate.model.decoder import Decoder, NotPlain
from multirate.model.finite import check_weights
from multirate.model.hf.decoder import HFDecoder
from multirate.model.native.decoder import NativeDecoder, OtherLogits

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
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    decoder = own_layers_decoder(device)(model)
    if backend != "hf":
        NativeDecoder.say_fallback(str(reason))
        if isinstance(reason, NotPlain):
            warnings.warn(
                f"running the model's own layers instead of packed weights: {reason}",
                Notice,
                stacklevel=3,
            )
    return decoder


def own_layers_decoder(device: torch.device) -> type[HFDecoder]:
    """What calls the model's own layers on this device: on CUDA they are recorded and replayed."""
    return GraphedDecoder if device.type == "cuda" else HFDecoder
