"""The parts of a transformers decoder that `inspect.find_parts` locates, and how to run them one by
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from multirate.runtime.attention_kernels import kernels_of_any_shape

PositionEmbeddings = Mapping[str | None, Any]
"""(cos, sin) for each layer type; key None when all layers share one rotary embedding. Empty
without rotary.
"""


@dataclass(frozen=True)
class Site:
    """A place an adapter may add to: outputs [start, stop) of `module` (a linear, a fused linear or
    the MLP block).
    """

    module: nn.Module
    in_features: int
    out_features: int
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True)
class MoEParts:
    """A mixture-of-experts block: `router` scores `num_experts`, `top_k` of which run in `experts`
    for each token.
    """

    block: nn.Module
    router: nn.Module
    experts: nn.Module
    num_experts: int
    top_k: int

    def route(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The router on its inputs [N, d] → logits [N, E] and the experts chosen by the model's own
        rule [N, k].
        """
        outputs = self.router(inputs)
        logits = next(
            x for x in outputs if x.is_floating_point() and x.shape[-1] == self.num_experts
        )
        chosen = next(x for x in outputs if not x.is_floating_point())
        return logits, chosen


@dataclass(frozen=True)
class LayerParts:
    """One decoder layer. `sites` has what exists of "q", "o", "gate", "up", "down", "mlp";
    `linears` the located projections by role ("q", "k", "v", "o", or fused "qkv"); `window` None:
    full attention.
    """

    index: int
    module: nn.Module
    attention: nn.Module
    mlp: nn.Module | None
    moe: MoEParts | None
    sites: Mapping[str, Site]
    linears: Mapping[str, nn.Module]
    layer_type: str | None
    window: int | None
    cache_argument: str
    arguments: frozenset[str]

    def before_norms(
        self, hook: Callable[[nn.Module, tuple[Any, ...]], None]
    ) -> list[RemovableHandle]:
        """Calls hook(norm, its arguments) before each of the layer's norms runs: the last one
        before a router is the mixture's own, its input the stream after attention.
        """
        norms = [
            child for child in self.module.children() if "norm" in type(child).__name__.lower()
        ]
        return [norm.register_forward_pre_hook(hook) for norm in norms]

    def before_router(self, hook: Callable[[nn.Module, Tensor], None]) -> list[RemovableHandle]:
        """Calls hook(norm, stream) when a mixture's router is about to run: its norm, and that
        norm's input, the stream after attention. The hook may raise to end the layer there.
        """
        assert self.moe is not None
        last: list[Any] = []

        def at_norm(norm: nn.Module, arguments: tuple[Any, ...]) -> None:
            last[:] = [norm, arguments[0]]

        handles = self.before_norms(at_norm)
        return [*handles, self.moe.router.register_forward_pre_hook(lambda *_: hook(*last))]


class _KVWritten(Exception):
    """Ends a layer when its keys and values have been written."""


class _WriteOnly:
    """Hands keys and values on to a cache, and ends the layer there."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def update(self, *arguments: Any, **more: Any) -> tuple[Tensor, Tensor]:
        self._cache.update(*arguments, **more)
        raise _KVWritten


class _AtRouter(Exception):
    """Ends a layer at its router."""

    def __init__(self, norm: nn.Module, stream: Tensor) -> None:
        super().__init__()
        self.norm, self.stream = norm, stream


@dataclass(frozen=True)
class ModelParts:
    """Everything needed to run a decoder-only transformers model layer by layer, with or without
    gradients.

    `moe[i]` is None for a dense layer. `needs_eager`: attention sinks or soft-capping, which sdpa
    does not compute.
    """

    model: nn.Module
    config: Any
    base: nn.Module
    embed_tokens: nn.Module
    embed_positions: nn.Module | None
    embed_scale: float
    layers: tuple[LayerParts, ...]
    rotary_module: nn.Module | None
    rotary_by_type: bool
    norm: nn.Module | None
    head: nn.Module
    logit_scale: float
    logit_softcap: float | None
    needs_eager: bool
    tied_head: bool
    max_positions: int | None
    claimed_positions: int | None

    @property
    def moe(self) -> tuple[MoEParts | None, ...]:
        return tuple(layer.moe for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(layer.window for layer in self.layers)

    @property
    def dtype(self) -> torch.dtype:
        dtype = self.embed_tokens.weight.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        """Where it computes; of offloaded weights, whose own place is the meta device, where
        accelerate brings them.
        """
        device = self.embed_tokens.weight.device
        assert isinstance(device, torch.device)
        if device.type == "meta":
            wanted = getattr(getattr(self.embed_tokens, "_hf_hook", None), "execution_device", None)
            return torch.device("cpu" if wanted is None else wanted)
        return device

    def embed(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        """Token ids and positions of the same shape [...] → [..., d], as they enter layer 0."""
        x: Tensor = self.embed_tokens(ids)
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        if self.embed_positions is not None:
            x = x + self.embed_positions(position_ids)
        return x

    def position_embeddings(self, hidden: Tensor, position_ids: Tensor) -> PositionEmbeddings:
        """Rotary (cos, sin) at position_ids [B, T], in the dtype and on the device of `hidden`."""
        if self.rotary_module is None:
            return {}
        if not self.rotary_by_type:
            return {None: self.rotary_module(hidden, position_ids)}
        types = {layer.layer_type for layer in self.layers}
        return {kind: self.rotary_module(hidden, position_ids, kind) for kind in types}

    def run_layer(
        self,
        index: int,
        hidden: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        position_embeddings: PositionEmbeddings | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Layer `index` on hidden [B, T, d] → [B, T, d].

        attention_mask: additive, [B or 1, 1, T, S], S being the length of what `cache.update`
        returns; None means causal for sdpa (T = S) and unmasked for T = 1. `cache`: any object of
        `layer_caches`, or None (attend within).
        """
        layer = self.layers[index]
        arguments: dict[str, Any] = {"attention_mask": attention_mask, layer.cache_argument: cache}
        if "position_ids" in layer.arguments:
            arguments["position_ids"] = position_ids
        if "use_cache" in layer.arguments:
            arguments["use_cache"] = cache is not None
        if self.rotary_module is not None:
            if position_embeddings is None:
                position_embeddings = self.position_embeddings(hidden, position_ids)
            arguments["position_embeddings"] = position_embeddings[
                layer.layer_type if self.rotary_by_type else None
            ]
        output = layer.module(hidden, **arguments)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def run_to_kv(
        self,
        index: int,
        hidden: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        position_embeddings: PositionEmbeddings | None,
        cache: Any,
    ) -> None:
        """As `run_layer` (same arguments), up to where the layer gives its keys and values to
        `cache`.
        """
        try:
            # Ended from inside: no family needs to be told how it makes keys and values.
            self.run_layer(
                index, hidden, attention_mask, position_ids, position_embeddings, _WriteOnly(cache)
            )
        except _KVWritten:
            return
        raise RuntimeError(f"layer {index} never wrote keys and values")

    def run_to_router(
        self, index: int, hidden: Tensor, *arguments: Any
    ) -> tuple[Tensor, nn.Module]:
        """As `run_layer` (same arguments), a mixture layer up to its router → the stream after
        attention [B, T, d], and the norm through which the router reads it.
        """

        def stop(norm: nn.Module, stream: Tensor) -> None:
            # Raised from inside the layer's own forward: no family needs to be told where its
            # attention ends.
            raise _AtRouter(norm, stream)

        handles = self.layers[index].before_router(stop)
        try:
            self.run_layer(index, hidden, *arguments)
        except _AtRouter as reached:
            return reached.stream, reached.norm
        finally:
            for handle in handles:
                handle.remove()
        raise RuntimeError(f"layer {index} never asked its router")

    def final_norm(self, hidden: Tensor) -> Tensor:
        return hidden if self.norm is None else self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm, LM head, scale and soft-cap: [..., d] → [..., V] in the head's dtype."""
        return self.unembed(self.final_norm(hidden))

    def unembed(self, normed: Tensor) -> Tensor:
        """LM head, scale and soft-cap of what the final norm gave: [..., d] → [..., V] in the
        head's dtype.
        """
        logits: Tensor = self.head(normed)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    def implementation(self) -> str:
        """The attention implementation that `attention()` leaves in force: "sdpa" or "eager"."""
        current: str | None = self.config._attn_implementation
        if self.needs_eager:
            return "eager"
        if current in ("sdpa", "eager"):
            return str(current)
        return "sdpa" if getattr(self.base, "_supports_sdpa", False) else "eager"

    @contextmanager
    def attention(self) -> Iterator[str]:
        """An attention implementation that honours explicit masks, for the duration; yields its
        name.
        """
        before, wanted = self.config._attn_implementation, self.implementation()
        with kernels_of_any_shape():
            if before == wanted:
                yield wanted
                return
            self.config._attn_implementation = wanted
            try:
                yield wanted
            finally:
                self.config._attn_implementation = before

    def causal_masks(self, length: int, dtype: torch.dtype | None = None) -> list[Tensor | None]:
        """Each layer's additive mask [1, 1, T, T] for a whole sequence of T = `length` tokens.

        Layers with the same window share a tensor. None (sdpa only): plain causal, the fused
        kernel's own.
        """
        dtype = dtype or self.dtype
        slots = torch.arange(length, device=self.device)
        distance = slots[:, None] - slots[None, :]
        made: dict[int | None, Tensor | None] = {}
        for window in self.windows:
            key = window if window is not None and window < length else None
            if key in made:
                continue
            if key is None and self.implementation() == "sdpa":
                made[key] = None
                continue
            seen = distance >= 0 if key is None else (distance >= 0) & (distance < key)
            made[key] = additive(seen[None, None], dtype)
        return [made[w if w is not None and w < length else None] for w in self.windows]

    @staticmethod
    def position_ids(ids: Tensor) -> Tensor:
        """[B, T]: each token's position."""
        return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)


def attention_function(config: Any) -> Any:
    """What transformers calls to attend under this configuration; None: the modules' own ("eager"),
    or nothing known by that name.
    """
    return ALL_ATTENTION_FUNCTIONS.get(getattr(config, "_attn_implementation", None) or "", None)


def mask_function(config: Any) -> Any:
    """What transformers calls to make the masks under this configuration; None: nothing known."""
    return ALL_MASK_ATTENTION_FUNCTIONS.get(
        getattr(config, "_attn_implementation", None) or "", None
    )


def earlier_and_own(length: int, window: int | None, device: torch.device) -> Tensor:
    """bool [1, 1, T, 2T] for T = `length` rows over T given positions and T of their own: a row
    sees what is given for the positions before it, and its own.
    """
    slots = torch.arange(length, device=device)
    distance = slots[:, None] - slots[None, :]
    earlier = (distance > 0) if window is None else (distance > 0) & (distance < window)
    return torch.cat([earlier, distance == 0], dim=1)[None, None]


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask (True: visible) as one that is added to attention scores."""
    # The smallest finite value, not -inf: a padding row sees nothing, and a softmax over -inf alone
    # is NaN.
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=seen.device)
    return torch.where(seen, torch.zeros((), dtype=dtype, device=seen.device), hidden)
