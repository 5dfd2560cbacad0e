"""The frozen base as a teacher: one forward gives every slow residual, and its layers run again for
other rows.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from multirate.methods._shared.distillation import Head, TopTokens
from multirate.methods._shared.shape import BaseShape
from multirate.runtime.decoder import LayerAdapter
from multirate.runtime.hf.adapter_hooks import apply_adapter
from multirate.runtime.hf.inspect import find_parts
from multirate.runtime.hf.layer_caches import RecordingKV, SharedKV, SharedThenOwnKV
from multirate.runtime.hf.parts import ModelParts, additive, earlier_and_own


@dataclass(frozen=True)
class Known:
    """What is known of a batch's samples already, so that the base need not run to its end."""

    final: Tensor
    """h_L [B, T, d], before the final norm"""
    top: TopTokens
    """the likeliest next tokens, [B, T, k]"""
    residual: dict[int, Tensor] = field(default_factory=dict)
    """layer index i → h_i [B, T, d] entering layer i, for some layers"""

    def __getitem__(self, samples: slice) -> Known:
        """Of some samples."""
        inner = {layer: x[samples] for layer, x in self.residual.items()}
        return Known(self.final[samples], self.top[samples], inner)

    def to(self, device: torch.device) -> Known:
        top = TopTokens(self.top.tokens.to(device), self.top.log_probs.to(device))
        inner = {layer: x.to(device) for layer, x in self.residual.items()}
        return Known(self.final.to(device), top, inner)


@dataclass
class SlowPass:
    """What the base computed for a batch of T tokens, without gradients."""

    final: Tensor
    """h_L [B, T, d], before the final norm"""
    normed: Tensor
    """final_norm(h_L) [B, T, d]"""
    shared: SharedKV
    """slow K/V (after rotary) of the layers asked for, each [B, H_kv, T, D]"""
    masks: list[Tensor | None]
    """each layer's additive mask; None: plain causal"""
    position_ids: Tensor
    """[B, T]"""
    rotary: Any
    """the base's rotary tables at ``position_ids``"""
    residual: dict[int, Tensor] = field(default_factory=dict)
    """layer index i → h_i [B, T, d] entering layer i, for i = 0 and the gates asked for"""
    top: TopTokens | None = None
    """the likeliest next tokens, where they are known: [B, T, k]"""

    def target(self, rows: Tensor) -> Tensor | TopTokens:
        """What students of ``rows`` (bool [B, T]) are distilled towards: see ``distil``."""
        return self.normed[rows] if self.top is None else self.top[rows]


def head_of(parts: ModelParts) -> Head:
    head = parts.head
    bias: Tensor | None = getattr(head, "bias", None)
    return Head(cast(Tensor, head.weight), bias, parts.logit_scale, parts.logit_softcap)


class Teacher:
    """A frozen causal LM of transformers. Not an ``nn.Module``, so that its weights never count as
    trained parameters.
    """

    def __init__(self, model: Any) -> None:
        model.requires_grad_(False).eval()
        self.parts = find_parts(model)
        sites = frozenset.intersection(*(frozenset(layer.sites) for layer in self.parts.layers))
        self.shape = replace(BaseShape.of(model.config), sites=sites)
        self.head = head_of(self.parts)

    def norm(self, x: Tensor) -> Tensor:
        """The base's final norm, [..., d]; differentiable in x."""
        return self.parts.final_norm(x)

    @torch.no_grad()
    def slow(
        self, ids: Tensor, shared: int, gates: tuple[int, ...] = (), known: Known | None = None
    ) -> SlowPass:
        """Run the base on ids [B, T] (padding on the right, so causality alone masks it).

        Keeps K/V of layers < ``shared``, and the residuals h_0 and h_G for G in ``gates``. With
        what is ``known`` only the layers these need are run.
        """
        parts = self.parts
        inner = (
            {} if known is None else {g: known.residual[g] for g in gates if g in known.residual}
        )
        gates = tuple(gate for gate in gates if gate not in inner)
        depth = len(parts.layers) if known is None else max((shared, *gates))
        position_ids = parts.position_ids(ids)
        recorder = RecordingKV()
        with parts.attention():
            x = parts.embed(ids, position_ids)
            masks = parts.causal_masks(ids.shape[1], dtype=x.dtype)
            rotary = parts.position_embeddings(x, position_ids)
            kept = {0: x}
            for i in range(depth):
                if i in gates:
                    kept[i] = x
                x = parts.run_layer(
                    i, x, masks[i], position_ids, rotary, recorder if i < shared else None
                )
        if depth in gates:
            kept[depth] = x
        kept |= {layer: states.to(x.dtype) for layer, states in inner.items()}
        if known is not None:
            x = known.final.to(x.dtype)
        return SlowPass(
            x,
            parts.final_norm(x),
            SharedKV(recorder.keys, recorder.values),
            masks,
            position_ids,
            rotary,
            kept,
            None if known is None else known.top,
        )

    def accelerated_layer(
        self, i: int, x: Tensor, slow: SlowPass, adapter: LayerAdapter | None
    ) -> Tensor:
        """Layer i on the accelerated rows x [B, T, d], over the slow K/V; differentiable in x and
        the adapter.
        """
        with ExitStack() as stack:
            stack.enter_context(self.parts.attention())
            if adapter is not None:
                stack.enter_context(apply_adapter(self.parts.layers[i], adapter))
            return self.parts.run_layer(
                i, x, slow.masks[i], slow.position_ids, slow.rotary, slow.shared
            )

    def onward(self, i: int, x: Tensor, slow: SlowPass) -> Tensor:
        """Layer i on rows x [B, T, d] thought to enter it, a mixture up to its router (the stream
        after attention), any other to its end. Each row attends to the slow K/V of the tokens
        before it and to its own; differentiable in x.
        """
        layer = self.parts.layers[i]
        mask = additive(earlier_and_own(x.shape[1], layer.window, x.device), x.dtype)
        cache = SharedThenOwnKV(slow.shared.keys, slow.shared.values)
        with self.parts.attention():
            if layer.moe is None:
                return self.parts.run_layer(i, x, mask, slow.position_ids, slow.rotary, cache)
            return self.parts.run_to_router(i, x, mask, slow.position_ids, slow.rotary, cache)[0]
