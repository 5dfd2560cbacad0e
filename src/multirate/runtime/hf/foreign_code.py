"""Code in a model that is not its library's: hooks, replaced functions, overridden methods.

A decoder that calls a model's layers one by one replaces the forward passes around them, and the
loop of `generate`. What a user, or PEFT, has put there would be left out without a trace, and a
comparison on a few tokens cannot rule that out: such code may wait for certain tokens or places.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_module

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
FUNCTIONS = ("apply_rotary_pos_emb", "rotate_half", "repeat_kv", "eager_attention_forward")
"""What the modules of transformers' families call by name in the file they are written in."""
MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
"""What a base model calls by name in its file to make its masks."""
TORCH_FUNCTIONS = (
    "linear",
    "embedding",
    "softmax",
    "scaled_dot_product_attention",
    "silu",
    "gelu",
    "relu",
    "sigmoid",
)
"""What they call by name in torch.nn.functional."""
LOOP = (
    "prepare_inputs_for_generation",
    "_prefill",
    "_sample",
    "_update_model_kwargs_for_generation",
)
"""The methods of a model that transformers' own decoding loop consists of."""
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "kernels")
_HARMLESS_HOOKS = ("multirate.", "transformers.utils.output_capturing")
"""Hooks of ours, and those with which transformers records hidden states on demand: both leave
outputs as they are.
"""


def foreign(hooks: Mapping[int, Any]) -> list[Any]:
    """Of a module's hooks, those that may change what it computes."""
    return [
        h
        for h in hooks.values()
        if not str(getattr(h, "__module__", None) or "").startswith(_HARMLESS_HOOKS)
    ]


def global_hooks() -> list[Any]:
    """Hooks that torch calls for every module of the process."""
    return [
        *torch_module._global_forward_hooks.values(),
        *torch_module._global_forward_pre_hooks.values(),
    ]


def hooked(model: nn.Module) -> str | None:
    """The first module with a hook that may change what it computes, in words; None: there is
    none.
    """
    for hook in global_hooks():
        return f"a hook on every module ({called(hook)})"
    for name, module in model.named_modules():
        if (found := hook_of(module)) is not None:
            return f"{found} of {name or 'the model'}"
    return None


def hook_of(module: nn.Module) -> str | None:
    """A hook of this module that may change what it computes, in words."""
    for name in HOOKS:
        for hook in foreign(getattr(module, name)):
            return f"a {name.strip('_').removesuffix('s').replace('_', ' ')} ({called(hook)})"
    return None


def called(function: Any) -> str:
    """A function's name with its module's."""
    while isinstance(function, functools.partial):
        function = function.func
    home = getattr(function, "__module__", None) or type(function).__module__
    return f"{home}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def of_a_library(function: Any) -> bool:
    """Whether a function and all that it wraps were written in torch, transformers or a library of
    theirs. What a decorator copies from the function that it wraps (`__module__`) is not asked.
    """
    while function is not None:
        if isinstance(function, functools.partial):
            function = function.func
            continue
        function = getattr(function, "__func__", function)
        home = getattr(function, "__globals__", {}).get("__name__") or function.__module__
        if not _of_libraries(home or ""):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _of_libraries(home: str) -> bool:
    return home.partition(".")[0] in _LIBRARIES


def replaced_torch_function() -> str | None:
    """The first function of torch.nn.functional that is not torch's own any more, in words."""
    for name in TORCH_FUNCTIONS:
        if not of_a_library(function := getattr(F, name)):
            return f"torch.nn.functional.{name} was replaced ({called(function)})"
    return None


def around(model: nn.Module, base: nn.Module) -> list[nn.Module]:
    """The modules that the base model is in, from the outermost on, and the base model itself."""
    name = next((name for name, one in model.named_modules() if one is base), "")
    steps = name.split(".") if name else []
    return [model.get_submodule(".".join(steps[:i])) for i in range(len(steps) + 1)]


def left_out(model: nn.Module, base: nn.Module) -> str | None:
    """The first thing that running the layers of `base` one by one would leave out of what `model`
    generates, in words; None: nothing is known.
    """
    outer = around(model, base)
    for module in outer:
        name = type(module).__name__
        if (hook := hook_of(module)) is not None:
            return f"its {name} has {hook}"
        if (forward := _other_forward(module)) is not None:
            return f"its {name} has a forward of its own ({called(forward)})"
    home = vars(sys.modules[type(base).__module__])
    for name in MASKS if _of_libraries(type(base).__module__) else ():
        if name in home and not of_a_library(home[name]):
            return f"its {name} is not that of transformers ({called(home[name])})"
    for name in LOOP:
        method = getattr(model, name, None)
        own = any(getattr(method, "__self__", None) is module for module in outer)
        if method is not None and not (own and of_a_library(method)):
            return f"its {name} is not that of transformers ({called(method)})"
    return _of_peft(model)


def _other_forward(module: nn.Module) -> Any | None:
    """A forward that was put on the module or its class in place of a library's."""
    own = vars(module).get("forward")
    own = getattr(own, "_torchdynamo_orig_callable", own)  # torch.compile(module.forward)
    cls = type(module)
    if own is not None and own != cls.forward.__get__(module):
        hook = getattr(module, "_hf_hook", None)  # accelerate's, which moves weights
        if hook is None or not type(hook).__module__.startswith("accelerate."):
            return own
    if not of_a_library(cls.__call__):
        return cls.__call__
    owner, *others = [one for one in cls.__mro__ if "forward" in vars(one)]
    if of_a_library(forward := vars(owner)["forward"]):
        return None
    # An architecture of the user's own may have any forward: it is compared with its parts.
    known = any(_of_libraries(one.__module__) for one in (owner, *others) if one is not nn.Module)
    return forward if known else None


def _of_peft(model: nn.Module) -> str | None:
    """Adapters of PEFT whose outputs do not depend on a module's input row alone."""
    for module in model.modules():
        config = getattr(module, "peft_config", None)
        for one in config.values() if isinstance(config, dict) else ():
            kind = str(getattr(one.peft_type, "value", one.peft_type))
            if getattr(one, "is_prompt_learning", False) and _is_active(module, one):
                return f"PEFT prepends a learned prompt to its inputs ({kind})"
            if kind in ("XLORA", "POLY"):
                return f"PEFT chooses adapters for each text ({kind})"
        for name in HOOKS:
            for hook in getattr(module, name).values():
                if called(hook).startswith("peft."):
                    return f"PEFT chooses adapters for this call ({called(hook)})"
        for name in _active_adapters(module):
            variant = getattr(module, "lora_variant", {}).get(name)
            if "alora" in str(getattr(variant, "__name__", type(variant).__name__)).lower():
                return f"PEFT's adapter {name!r} is activated by certain tokens (aLoRA)"
    return None


def _is_active(module: nn.Module, config: Any) -> bool:
    return not getattr(module, "_adapters_disabled", False) and (
        getattr(module, "active_peft_config", config) is config
    )


def _active_adapters(module: nn.Module) -> Iterator[str]:
    if hasattr(module, "lora_variant") and not getattr(module, "disable_adapters", False):
        active = getattr(module, "active_adapters", ())
        yield from [active] if isinstance(active, str) else active
