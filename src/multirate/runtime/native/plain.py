"""Whether a model's modules are the plain ones whose weights alone say what they compute.

The kernel reads weights and knows the families' forward passes by heart. What else a module may do
(a LoRA wrapper, a hook, a parametrisation, a quantised or offloaded weight) is not in its weight,
so such a module must not be packed.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from multirate.runtime.decoder import NotPlain
from multirate.runtime.hf.foreign_code import (
    FUNCTIONS,
    around,
    called,
    global_hooks,
    hook_of,
    of_a_library,
    replaced_torch_function,
)
from multirate.runtime.hf.parts import LayerParts, ModelParts
from multirate.runtime.native.families import (
    Family,
    activation,
    activation_function,
    attention_scale,
    epsilon,
)
from multirate.runtime.quantised import QuantisedWeight, weight_of

_WEIGHTED = (nn.Linear, nn.Embedding)


def unknown_part(parts: ModelParts, family: Family) -> NotPlain | None:
    """The first module of a model that is not plain, by name, and why; None: all of them are.

    family: whose classes are expected.
    """
    names = {module: name for name, module in parts.model.named_modules(remove_duplicate=False)}
    home = family.module
    for hook in global_hooks():
        return NotPlain(f"torch calls a hook on every module ({called(hook)})")
    for name in FUNCTIONS:
        function = getattr(sys.modules[home], name)
        if function.__module__ != home or not of_a_library(function):
            return NotPlain(f"{home}.{name} was replaced ({called(function)})")
    if (replaced := replaced_torch_function()) is not None:
        return NotPlain(replaced)
    # What is around the language model may be another family's, of models that read images, too.
    # What that makes of text is compared when the model is packed.
    outside, outer = around(parts.model, parts.base)[:-1], type(parts.model).__module__
    homes = dict.fromkeys(outside, outer if outer.startswith("transformers.models.") else home)
    for module, kind in [*((one, None) for one in outside), *_modules(parts, family)]:
        reason = (
            _own_behaviour(module)
            or _of_other_class(module, kind, homes.get(module, home))
            or _unusual_weight(module, kind)
        )
        if reason is not None:
            return NotPlain(f"{names.get(module) or 'the model'} {reason}")
    if parts.norm is not None and (reason := _other_epsilon(parts.norm, parts)):
        return NotPlain(f"{names[parts.norm]} {reason}")
    for layer in parts.layers:
        reason = _other_arithmetic(layer, parts, family)
        if reason is not None:
            return NotPlain(f"{names[layer.module]} {reason}")
    return None


def _modules(
    parts: ModelParts, family: Family
) -> Iterator[tuple[nn.Module, type[nn.Module] | None]]:
    """Every module of the base model that the kernel stands in for, and the head, each with its
    class where that is not one of the family's own file (None: it is).
    """
    yield parts.base, None
    scaled = hasattr(parts.embed_tokens, "embed_scale")
    yield parts.embed_tokens, None if scaled else nn.Embedding
    for layer in parts.layers:
        module: Any = layer.module
        yield module, None
        for block, linears in family.linears.items():
            inner = getattr(module, block)
            yield inner, None
            for name in linears if layer.moe is None or block == "self_attn" else ():
                yield getattr(inner, name), nn.Linear
        if layer.moe is not None:
            yield layer.moe.router, None
        if (function := activation_function(layer)) is not None:
            yield function, type(function)
        for norm in family.norms(layer).values():
            yield norm, None
        for name in family.extra:
            yield getattr(module, name), nn.Dropout
    if parts.rotary_module is not None:
        yield parts.rotary_module, None
    if parts.norm is not None:
        yield parts.norm, None
    yield parts.head, nn.Linear


def _own_behaviour(module: nn.Module) -> str | None:
    """What one module does beside its class's forward."""
    if "forward" in vars(module):
        offloaded = ", as in offloaded modules" if hasattr(module, "_hf_hook") else ""
        return f"has a forward of its own (set on the instance{offloaded})"
    if (hook := hook_of(module)) is not None:
        return f"has {hook}"
    if hasattr(module, "parametrizations"):
        return f"is parametrised ({', '.join(module.parametrizations)})"  # type: ignore[arg-type]
    return None


def _of_other_class(module: nn.Module, kind: type[nn.Module] | None, home: str) -> str | None:
    cls = type(module)
    if kind is not None and cls is not kind:
        return (
            f"is a {cls.__module__.partition('.')[0]} {cls.__name__}, not a plain {kind.__name__}"
        )
    if kind is None and cls.__module__ != home:
        return f"is a {cls.__module__.partition('.')[0]} {cls.__name__}, not one of {home}"
    source = next(one for one in cls.__mro__ if "forward" in vars(one))
    forward = vars(source)["forward"]
    written_there = isinstance(forward, types.FunctionType) and (
        forward.__module__ == source.__module__ and of_a_library(forward)
    )
    if not written_there:
        return f"is a {cls.__name__} whose class has a replaced forward ({called(forward)})"
    if cls.__call__ is not nn.Module.__call__:
        return f"is a {cls.__name__} whose class has a __call__ of its own ({called(cls.__call__)})"
    return None


def _unusual_weight(module: nn.Module, kind: type[nn.Module] | None) -> str | None:
    quantised = "quantised" in vars(module) and isinstance(weight_of(module), QuantisedWeight)
    for name, parameter in module.named_parameters(recurse=False):
        if type(parameter) not in (nn.Parameter, Tensor) or parameter.layout != torch.strided:
            return f"has a {name} that is a {type(parameter).__name__}, not a plain tensor"
        if parameter.device.type != "cpu" and not (quantised and name == "weight"):
            return f"has its {name} on {parameter.device}, not on the CPU"
        if kind is not None and parameter.dtype != torch.bfloat16 and not quantised:
            return f"has a {name} of {str(parameter.dtype).removeprefix('torch.')}, not bfloat16"
    if getattr(module, "max_norm", None) is not None:
        return "scales its rows as they are looked up (max_norm)"
    if kind in _WEIGHTED and not isinstance(vars(module)["_parameters"].get("weight"), Tensor):
        return "has no weight among its parameters"
    return None


def _other_arithmetic(layer: LayerParts, parts: ModelParts, family: Family) -> str | None:
    """A number or function that the family's forward reads from the instance and the kernel from
    the configuration.
    """
    module: Any = layer.module
    attention = module.self_attn
    for norm in family.norms(layer).values():
        reason = _other_epsilon(norm, parts)
        if reason is not None:
            return reason
    if not math.isclose(attention.scaling, attention_scale(parts.config)):  # a last bit at most
        return f"scales its attention scores by {attention.scaling}"
    if getattr(attention, "attn_logit_softcapping", None) is not None:
        return f"caps its attention scores at {attention.attn_logit_softcapping}"
    if (most := getattr(parts.config, "clip_qkv", None)) is not None:
        return f"clips its queries, keys and values at {most}"
    biases = {
        name: getattr(attention, name).bias is not None
        for name in family.linears["self_attn"]
        if name != "o_proj"
    }
    if len(set(biases.values())) > 1:
        return f"has a bias only in {' and '.join((name for name, has in biases.items() if has))}"
    if layer.moe is None:
        first = next(one for one in parts.layers if one.moe is None)
        if activation(layer) is None or activation(layer) != activation(first):
            return f"has the activation {type(activation_function(layer)).__name__}"
        for name in family.linears["mlp"]:
            if getattr(module.mlp, name).bias is not None:
                return f"has a bias in {name}"
    return None


def _other_epsilon(norm: Any, parts: ModelParts) -> str | None:
    if epsilon(norm) == parts.config.rms_norm_eps:
        return None
    return (
        f"has a norm with epsilon {epsilon(norm)}, but the configuration has "
        f"{parts.config.rms_norm_eps}"
    )
