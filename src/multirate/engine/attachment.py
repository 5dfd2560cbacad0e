"""Makes an engine for a model."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from multirate.engine.engine import Engine
from multirate.errors import UserError
from multirate.experts.load import load_offloaded
from multirate.experts.model import experts_on_disk
from multirate.generation_lock import lock_of
from multirate.loading.hub import LoadedModel, check_weights_option, load_model
from multirate.methods.spec import PLAIN
from multirate.runtime.load import load_decoder, quantised_for_kernel
from multirate.runtime.quantised import expanded, is_quantised
from multirate.training.checkpoint import Accelerator


def attach(
    model: Any,
    accelerator: str | os.PathLike[str] | Accelerator | None = None,
    backend: str = "auto",
    tokenizer: Any = None,
    experts: str | os.PathLike[str] | None = None,
    expert_memory: str | int | None = None,
    expert_policy: str | None = None,
    expert_predictor: str | os.PathLike[str] | None = None,
    weights: str = "file",
) -> Engine:
    """Makes an engine for a causal language model. The model itself stays unchanged.

        engine = multirate.attach("smollm2")
        prompt = engine.tokenizer("The capital of France is")["input_ids"]
        output = engine.generate([prompt], stop=engine.stopping(max_new_tokens=32))
        print(engine.tokenizer.decode(output.sequences[0]))

    model: a causal LM of transformers, a local folder, a GGUF file, a hub id, a short name such as
        "smollm2", or what hub.load_model returned.
    accelerator: a trained one: its folder, its hub id, or the name of one that this package has for
        the model. None: a method that needs no training (`Engine.default`). An accelerator that was
        trained for other weights of the same shape (a fine-tuned or quantised copy) is accepted;
        before its first drafts the engine measures it on a few short texts and reports the result.
    backend: "native" runs packed bf16 weights with the C kernel, "hf" runs the model's own layers,
        "auto" uses the kernel if it can run the model.
    tokenizer: needed for stop strings and for that measurement. A model loaded by name brings its
        own.
    experts: for a mixture of experts given by name: the store (`multirate pack`) to read its
        experts from as they are needed.
    expert_memory: how much memory the experts may use, such as "2GB" (default: all of them). This
        and the next two need experts on disk.
    expert_policy: see experts/named_policies.py (default: aot).
    expert_predictor: folder or hub id of a predictor from `multirate train --objective experts`.
    weights: "file": as they are, so that the kernel runs a GGUF file's own formats; "bf16": a GGUF
        file expanded; "q8_0", "q4_0" or "q4_1": a copy of any other model, quantised now, which
        the engine has as its `model`.

    Raises UserError, with the reason, for anything that cannot be used.
    """
    check_weights_option(weights)
    if experts is not None and weights != "file":
        raise UserError(f"weights {weights} do not work with experts=DIR: leave weights out")
    check_weights_option(weights)
    if isinstance(model, (str, os.PathLike)):
        model, weights = _named(os.fspath(model), experts, weights), "file"
    elif not isinstance(model, (LoadedModel, nn.Module)):
        raise UserError(
            f"the model is {model!r}; accepted: a causal LM of transformers, or its folder or "
            "hub id"
        )
    elif experts is not None:
        raise UserError("experts=DIR needs the model's folder or hub id, not a loaded model")
    if isinstance(model, LoadedModel):
        model, tokenizer = model.model, tokenizer or model.tokenizer
    if type(model).__name__ == "OptimizedModule":  # torch.compile's, around the model
        model = model._orig_mod
    if weights != "file":
        model = _with_weights(model, weights)
    # building a decoder may run the model, and exchanges what reads its experts
    with lock_of(model).held():
        engine = _engine(model, backend, tokenizer, expert_memory, expert_policy, expert_predictor)
    if accelerator is not None:
        engine.add(accelerator)
    return engine


def _named(name: str, experts: str | os.PathLike[str] | None, weights: str) -> LoadedModel:
    if experts is None:
        return load_model(name, weights=weights)
    if weights != "file":
        raise UserError(f"weights {weights} do not work with experts=DIR: leave weights out")
    return load_offloaded(name, experts)


def _engine(
    model: Any,
    backend: str,
    tokenizer: Any,
    memory: str | int | None,
    policy: str | None,
    predictor: str | os.PathLike[str] | None,
) -> Engine:
    offloaded = experts_on_disk(model)
    if offloaded is None:
        for what, value in (("expert_memory", memory), ("expert_predictor", predictor)):
            if value is not None:
                raise UserError(
                    f"{what} is {value!r}, but the model has no experts on disk; "
                    "leave it out, or name a store with experts=DIR"
                )
        return Engine(model, load_decoder(model, backend), tokenizer, backend)
    if predictor is not None:
        offloaded.add(predictor)
    engine = Engine(model, offloaded.start(backend, policy, memory), tokenizer, backend)
    engine.experts = offloaded
    engine.default = PLAIN  # every row of a draft has experts to read
    return engine


def _with_weights(model: Any, weights: str) -> Any:
    if weights != "bf16":
        return quantised_for_kernel(model, weights)
    if not is_quantised(model) and model.dtype != torch.bfloat16:
        dtype = str(model.dtype).removeprefix("torch.")
        raise UserError(f"weights is 'bf16', but the model is {dtype}: call model.bfloat16() first")
    return expanded(model)
