"""Finds the parts of a transformers decoder-only model by structure, or says why it cannot be
run.
"""

from __future__ import annotations

import inspect
import math
import sys
from typing import Any, NoReturn

from torch import nn

from multirate.errors import UserError, first_line
from multirate.runtime.hf.foreign_code import called, left_out, of_a_library
from multirate.runtime.hf.parts import (
    LayerParts,
    ModelParts,
    MoEParts,
    Site,
    attention_function,
    mask_function,
)

__all__ = ["LayerParts", "MoEParts", "ModelParts", "Site", "find_parts", "ropes"]

_LAYER_ARGUMENTS = {
    "hidden_states",
    "attention_mask",
    "position_ids",
    "position_embeddings",
    "use_cache",
}
_CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value", "layer_past")
_OTHER_WINDOWS = ("window_size", "attention_window", "attention_chunk_size")
"""Of local attention that hides other places than `sliding_window` does; they may be too wide for a
few tokens to show it.
"""
_OUTPUT_NAMES = ("o_proj", "out_proj", "c_proj", "dense")
_UP_NAMES = ("up_proj", "c_fc", "fc1", "dense_h_to_4h")
_DOWN_NAMES = ("down_proj", "c_proj", "fc2", "dense_4h_to_h")


def _refuse(model: nn.Module, reason: str) -> NoReturn:
    raise UserError(f"cannot run {type(model).__name__}: {reason}")


def find_parts(model: nn.Module) -> ModelParts:
    """The parts of `model`, a decoder-only causal language model of transformers.

    Raises UserError naming the model class and the reason: encoder-decoder, state-space or linear
    attention, bidirectional attention, no LM head, a part whose role is unknown, or code of the
    user's or of PEFT's that running its layers would leave out.
    """
    try:
        return _find_parts(model)
    except (TypeError, AttributeError, KeyError, IndexError, ValueError, RuntimeError) as error:
        raise UserError(
            f"cannot run {type(model).__name__}: its parts are not those of a known decoder "
            f"({first_line(error)})"
        ) from error


def _find_parts(model: nn.Module) -> ModelParts:
    full_config = getattr(model, "config", None)
    if full_config is None or not hasattr(full_config, "get_text_config"):
        _refuse(model, "it is not a transformers model")
    if getattr(full_config, "is_encoder_decoder", False):
        _refuse(model, "it is an encoder-decoder; only decoder-only models are supported")
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        _refuse(model, "it has no language-model head; load it with AutoModelForCausalLM")
    config = full_config.get_text_config(decoder=True)
    if getattr(config, "use_bidirectional_attention", None):
        _refuse(model, "its attention is bidirectional; only causal attention is supported")
    for what, function in (
        ("attention implementation", attention_function(config)),
        ("mask of the attention implementation", mask_function(config)),
    ):
        if function is not None and not of_a_library(function):
            _refuse(
                model,
                f"its {what} {config._attn_implementation!r} is a function of "
                f"{called(function)}; only transformers' own are supported "
                "(set_attn_implementation)",
            )

    base = model.get_decoder()  # type: ignore[operator]
    embed_tokens = model.get_input_embeddings()  # type: ignore[operator]
    _check_vocabulary(model, head, embed_tokens, int(config.vocab_size))
    for name in _OTHER_WINDOWS:
        if getattr(config, name, None) is not None:
            _refuse(model, f"its attention has a {name}; only sliding_window is supported")
    if (foreign := left_out(model, base)) is not None:
        _refuse(model, foreign)
    found = _classify(model, base, embed_tokens, config)
    modules = found["layers"]
    rotary = found.get("rotary")
    layers = tuple(_layer(model, base, module, i, config) for i, module in enumerate(modules))
    places = [getattr(layer.attention, "layer_idx", i) for i, layer in enumerate(layers)]
    if sorted(places) != list(range(len(layers))):
        _refuse(
            model,
            f"its layers store their keys and values at the cache indices {places}, not each at "
            f"one of 0 to {len(layers) - 1}",
        )
    softcap = getattr(config, "attn_logit_softcapping", None)
    sinks = any(hasattr(layer.attention, "sinks") for layer in layers)
    head_weight = getattr(head, "weight", None)
    return ModelParts(
        model=model,
        config=config,
        base=base,
        embed_tokens=embed_tokens,
        embed_positions=found.get("positions"),
        embed_scale=float(getattr(config, "embedding_multiplier", None) or 1.0),
        layers=layers,
        rotary_module=rotary,
        rotary_by_type=rotary is not None
        and "layer_type" in inspect.signature(rotary.forward).parameters
        and _ropes_by_type(config),
        norm=found.get("norm"),
        head=head,
        logit_scale=_logit_scale(config),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        needs_eager=sinks or softcap is not None,
        tied_head=head_weight is not None and head_weight is embed_tokens.weight,
        max_positions=(longest := _max_positions(config)),
        claimed_positions=_claimed(config, longest),
    )


def _check_vocabulary(model: nn.Module, head: Any, embed_tokens: Any, size: int) -> None:
    """Prompts are checked, and memory is sized, by the configuration's vocabulary."""
    logits = len(head.weight) if type(head) is nn.Linear else getattr(head, "out_features", None)
    embedded = len(embed_tokens.weight) if type(embed_tokens) is nn.Embedding else None
    if logits not in (None, size) or (embedded is not None and embedded < size):
        _refuse(
            model,
            f"its configuration has a vocabulary of {size}, but its head gives {logits} logits "
            f"and {embedded} tokens have embeddings (resize_token_embeddings changes all three)",
        )


def _classify(
    model: nn.Module, base: nn.Module, embed_tokens: nn.Module, config: Any
) -> dict[str, Any]:
    """Gives every child of the base model its role; a child with weights and no known role is
    refused.
    """
    found: dict[str, Any] = {}

    def take(role: str, name: str, module: nn.Module) -> None:
        if role in found:
            _refuse(
                model, f"its part {name!r} ({type(module).__name__}) looks like a second {role}"
            )
        found[role] = module

    count = config.num_hidden_layers
    for name, child in base.named_children():
        kind = type(child).__name__.lower()
        if child is embed_tokens or isinstance(child, nn.Dropout):
            continue
        if isinstance(child, nn.ModuleList) and len(child) == count:
            take("layers", name, child)
        elif "rotary" in kind:
            take("rotary", name, child)
        elif "norm" in kind:
            take("norm", name, child)
        elif isinstance(child, nn.Embedding) and type(child) is nn.Embedding:
            take("positions", name, child)
        elif next(child.parameters(), None) is not None:
            _refuse(
                model,
                f"its part {name!r} ({type(child).__name__}) has no known role in a decoder-only "
                "model",
            )
    if "layers" not in found:
        _refuse(model, f"{type(base).__name__} has no list of its {count} layers")
    return found


def _layer(
    model: nn.Module, base: nn.Module, module: nn.Module, index: int, config: Any
) -> LayerParts:
    children = dict(module.named_children())
    attentions = [
        c
        for c in children.values()
        if "attention" in type(c).__name__.lower() and hasattr(c, "forward")
    ]
    if len(attentions) != 1:
        what = ", ".join(type(c).__name__ for c in children.values())
        _refuse(
            model,
            f"layer {index} has {len(attentions)} attention blocks among its parts ({what}); "
            "exactly one is supported",
        )
    attention = attentions[0]
    if getattr(attention, "is_causal", True) is False:
        _refuse(model, f"the attention of layer {index} is not causal (is_causal=False)")

    names = inspect.signature(module.forward).parameters
    cache_argument = next((name for name in _CACHE_ARGUMENTS if name in names), None)
    if cache_argument is None:
        _refuse(model, f"layer {index} accepts no key/value cache")
    unknown = [
        name
        for name, p in names.items()
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and name not in _LAYER_ARGUMENTS
        and name not in _CACHE_ARGUMENTS
    ]
    if unknown:
        _refuse(model, f"its layers need the unknown argument {unknown[0]!r}")

    rest = [
        c
        for c in children.values()
        if c is not attention
        and "norm" not in type(c).__name__.lower()
        and next(c.parameters(), None) is not None
    ]
    block = rest[0] if len(rest) == 1 and any(True for _ in rest[0].children()) else None
    moe = _moe(block, config)
    linears, sites = _attention_sites(attention, config)
    sites.update(_mlp_sites(block, moe, config))
    layer_type = _layer_type(model, config, index)
    return LayerParts(
        index=index,
        module=module,
        attention=attention,
        mlp=block,
        moe=moe,
        sites=sites,
        linears=linears,
        layer_type=layer_type,
        window=_window(model, base, config, layer_type),
        cache_argument=cache_argument,
        arguments=frozenset(names),
    )


def _layer_type(model: nn.Module, config: Any, index: int) -> str | None:
    types = getattr(config, "layer_types", None)
    if types is None:
        return None
    kind = str(types[index])
    if kind not in ("full_attention", "sliding_attention"):
        _refuse(
            model,
            f"layer {index} is of type {kind!r}; only full_attention and sliding_attention are "
            "supported",
        )
    return kind


def _window(model: nn.Module, base: nn.Module, config: Any, layer_type: str | None) -> int | None:
    window = getattr(config, "sliding_window", None)
    if window is None or layer_type == "full_attention":
        return None
    # Without layer types, a config may carry a window that its model ignores: the model's code then
    # never makes a sliding mask. The cache of `generate` keeps no more than it all the same.
    module = sys.modules[type(base).__module__]
    if layer_type is None and not hasattr(module, "create_sliding_window_causal_mask"):
        if window < (getattr(config, "max_position_embeddings", None) or math.inf):
            _refuse(
                model,
                f"its configuration has a sliding_window of {window}, which its layers ignore "
                "but the cache of transformers' generate applies",
            )
        return None
    return int(window)


def _features(linear: nn.Module) -> tuple[int, int]:
    if hasattr(linear, "in_features"):
        return int(linear.in_features), int(linear.out_features)  # type: ignore[arg-type]
    nx, nf = linear.weight.shape  # type: ignore[misc]
    return int(nx), int(nf)  # transformers' Conv1D stores [in, out]


def _site(linear: nn.Module, start: int | None = None, stop: int | None = None) -> Site:
    inputs, outputs = _features(linear)
    return Site(linear, inputs, outputs if stop is None else stop - (start or 0), start, stop)


def _first(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    return next(
        (m for name in names if isinstance(m := getattr(module, name, None), nn.Module)), None
    )


def _linear(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """As `_first`; None also where it does not say its sizes, as some wrappers do not."""
    found = _first(module, names)
    sized = (
        hasattr(found, "in_features")
        or getattr(getattr(found, "weight", None), "shape", None) is not None
    )
    return found if sized else None


def _attention_sites(
    attention: nn.Module, config: Any
) -> tuple[dict[str, nn.Module], dict[str, Site]]:
    linears: dict[str, nn.Module] = {}
    sites: dict[str, Site] = {}
    for role in ("q", "k", "v"):
        if (linear := _linear(attention, (f"{role}_proj",))) is not None:
            linears[role] = linear
    if "q" in linears:
        sites["q"] = _site(linears["q"])
    # Only layouts that put all queries first; a per-head interleaved projection (GPT-NeoX) offers
    # no "q".
    elif (fused := _linear(attention, ("qkv_proj", "c_attn"))) is not None:
        linears["qkv"] = fused
        head_dim = getattr(attention, "head_dim", config.hidden_size // config.num_attention_heads)
        sites["q"] = _site(fused, 0, config.num_attention_heads * head_dim)
    if (output := _linear(attention, _OUTPUT_NAMES)) is not None:
        linears["o"] = output
        sites["o"] = _site(output)
    return linears, sites


def _mlp_sites(block: nn.Module | None, moe: MoEParts | None, config: Any) -> dict[str, Site]:
    if block is None:
        return {}
    sites = {"mlp": Site(block, config.hidden_size, config.hidden_size)}
    if moe is not None:
        return sites
    if (fused := _linear(block, ("gate_up_proj",))) is not None:
        width = _features(fused)[1] // 2
        sites["gate"], sites["up"] = _site(fused, 0, width), _site(fused, width, 2 * width)
    for role, names in (("gate", ("gate_proj",)), ("up", _UP_NAMES), ("down", _DOWN_NAMES)):
        if role not in sites and (linear := _linear(block, names)) is not None:
            sites[role] = _site(linear)
    return sites


def _moe(block: nn.Module | None, config: Any) -> MoEParts | None:
    if block is None or not isinstance(experts := getattr(block, "experts", None), nn.Module):
        return None
    router = _first(block, ("gate", "router"))
    if router is None:
        return None
    counts = (
        getattr(config, key, None)
        for key in ("num_experts", "num_local_experts", "n_routed_experts")
    )
    count = next((int(n) for n in counts if n), 0)
    return MoEParts(
        block, router, experts, count, int(getattr(config, "num_experts_per_tok", 0) or 0)
    )


def _logit_scale(config: Any) -> float:
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        return 1.0 / float(divisor)
    return float(getattr(config, "logit_scale", None) or 1.0)


def ropes(config: Any) -> list[dict[str, Any]]:
    """The parameters of a configuration's rotary embeddings, one for each layer type or for all."""
    found = getattr(config, "rope_parameters", None) or {}
    return [r for r in found.values() if isinstance(r, dict)] if _ropes_by_type(config) else [found]


def _ropes_by_type(config: Any) -> bool:
    found = getattr(config, "rope_parameters", None) or {}
    return (
        any(isinstance(r, dict) for r in found.values())
        and getattr(config, "layer_types", None) is not None
    )


def _claimed(config: Any, longest: int | None) -> int | None:
    """The context that the configuration says, where it is more than the longest one run here."""
    said = getattr(config, "max_position_embeddings", None)
    return int(said) if said and longest is not None and said > longest else None


def _max_positions(config: Any) -> int | None:
    limits = [getattr(config, "max_position_embeddings", None)]
    for rope in ropes(config):
        # These recompute their frequencies beyond the original length, so rotated keys already
        # cached would no longer be those of a fresh run; up to it they are fixed.
        if rope.get("rope_type") in ("dynamic", "longrope"):
            limits.append(rope.get("original_max_position_embeddings"))
    known = [int(n) for n in limits if n]
    return min(known) if known else None
