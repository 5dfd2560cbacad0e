"""Where a predictor with attention starts, before any gradient: at what can be read off the experts
themselves.

Each pruned expert is taken from its expert, as the neurons that matter most, and ``up`` is fitted
by least squares to what the layer really adds: so it also says what the neurons left out add on
average. On our mixture that is most of what can be learned; from random ones 200 steps end well
below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from multirate.methods._shared.teacher import Teacher
from multirate.methods.m2r2_experts.modules import ExpertPredictor, Routing
from multirate.runtime.hf.parts import LayerParts

RIDGE = 1e-3
"""Of the features' mean square: rows hardly seen keep what was drawn for them."""


@torch.no_grad()
def start_from_experts(
    teacher: Teacher, predictor: ExpertPredictor, batches: Iterable[tuple[Tensor, Tensor, Any]]
) -> None:
    """Sets the pruned experts and ``up`` of ``predictor`` by what the layers do with the rows of
    ``batches`` (ids and mask [B, T], and what is known of them). Experts that are not
    transformers' fused modules keep their pruned experts as they are.
    """
    if not predictor.config.attention:
        return
    mixtures = [_Seen(part) for part in teacher.parts.layers if part.moe is not None]
    kept = list(batches)
    if predictor.gated is not None:
        neurons = [_Neurons(seen) for seen in mixtures if _readable(seen.experts)]
        _watch(teacher, kept, mixtures, [one.count for one in neurons])
        for one in neurons:
            one.draw(predictor)
    fits = [_Fit(seen, predictor) for seen in mixtures]
    _watch(teacher, kept, mixtures, [fit.add for fit in fits])
    for fit in fits:
        fit.solve()


def _watch(
    teacher: Teacher,
    batches: Iterable[tuple[Tensor, Tensor, Any]],
    mixtures: list[_Seen],
    each: list[Callable[[], None]],
) -> None:
    """Runs the base on the batches, and after each calls ``each``."""
    with ExitStack() as stack:
        for seen in mixtures:
            for handle in seen.watch():
                stack.callback(handle.remove)
        for ids, mask, _ in batches:
            for seen in mixtures:
                seen.mask = mask.flatten()
            teacher.slow(ids, shared=0)
            for call in each:
                call()


class _Seen:
    """What one mixture layer did in the last pass, for the rows of ``mask`` [B · T]."""

    hidden: Tensor  # what its experts read [N, d]
    routing: Routing
    residual: Tensor  # the stream at its router [N, d]
    leaving: Tensor  # the stream that leaves it [N, d]
    norm: nn.Module  # the one before its router

    def __init__(self, part: LayerParts) -> None:
        assert part.moe is not None
        self.part, self.experts = part, part.moe.experts
        self.mask = torch.empty(0, dtype=torch.bool, device="cpu")

    def watch(self) -> list[Any]:
        return [
            *self.part.before_router(self._at_router),
            self.experts.register_forward_pre_hook(self._at_experts),
            self.part.module.register_forward_hook(self._at_end),
        ]

    def _at_router(self, norm: nn.Module, residual: Tensor) -> None:
        self.norm, self.residual = norm, residual.flatten(0, -2)[self.mask].float()

    def _at_experts(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.hidden, chosen, weights = (one.flatten(0, -2)[self.mask] for one in arguments[:3])
        self.routing = chosen, weights.float()

    def _at_end(self, _: nn.Module, __: Any, output: Any) -> None:
        leaving: Tensor = output[0] if isinstance(output, tuple) else output
        self.leaving = leaving.flatten(0, -2)[self.mask].float()


def _readable(experts: nn.Module) -> bool:
    """Whether they are of the form that transformers gives to experts whose implementation can be
    exchanged.
    """
    return all(
        hasattr(experts, name) for name in ("gate_up_proj", "down_proj", "_apply_gate", "has_bias")
    )


class _Neurons:
    """The experts of a mixture, neuron by neuron, and how strongly each was at work."""

    def __init__(self, seen: _Seen) -> None:
        self._seen, self._experts = seen, seen.experts
        self._energy: Tensor | None = None  # [E, I]: sum over rows of (weight × activation)²

    def count(self) -> None:
        experts: Any = self._experts
        (chosen, weights), gate_up = self._seen.routing, self._matrices("gate_up_proj")
        energy = weights.new_zeros(len(gate_up), gate_up.shape[1] // 2)
        for expert in chosen.unique().tolist():
            rows, rank = (chosen == expert).nonzero(as_tuple=True)
            inner = self._seen.hidden[rows].float() @ gate_up[expert].float().T
            if experts.has_bias:
                inner = inner + experts.gate_up_proj_bias[expert].float()
            energy[expert] = (
                (weights[rows, rank, None] * experts._apply_gate(inner)).square().sum(0)
            )
        self._energy = energy if self._energy is None else self._energy + energy

    def _matrices(self, name: str) -> Tensor:
        """[E, out, in], however the model keeps it."""
        matrices: Tensor = getattr(self._experts, name).detach()
        return matrices.mT if getattr(self._experts, "is_transposed", False) else matrices

    def draw(self, predictor: ExpertPredictor) -> None:
        """The strongest neurons of each expert become its pruned expert, which reads n(r) where the
        expert reads the layer's norm of r: that norm's weights go into the matrices.
        """
        if self._energy is None:
            return
        assert predictor.sketch is not None and predictor.gated is not None
        gate_up, down = self._matrices("gate_up_proj").float(), self._matrices("down_proj")
        halves = getattr(self._experts, "is_concatenated", True)
        gate, up = gate_up.chunk(2, dim=1) if halves else (gate_up[:, ::2], gate_up[:, 1::2])
        scale = self._seen.norm(torch.ones_like(down[0, :, :1].mT)).float()
        layer, rank, rows = self._seen.part.index, predictor.config.rank, predictor.config.sketch
        strength = self._energy * down.float().square().sum(1)
        for expert, best in enumerate(strength.topk(min(rows, strength.shape[1])).indices):
            place = slice(expert * rows, expert * rows + len(best))
            predictor.sketch[layer, place] = gate[expert, best] * scale
            predictor.gated[layer, place] = up[expert, best] * scale
            predictor.up[0][layer, :, rank + place.start : rank + place.stop] = down[expert][
                :, best
            ].float()


class _Fit:
    """Least squares for ``up`` of one mixture: features to what the layer adds, each row relative
    to its rms.
    """

    def __init__(self, seen: _Seen, predictor: ExpertPredictor) -> None:
        self._seen, self._predictor = seen, predictor
        size, width = predictor.up[0].shape[2], predictor.base.hidden_size
        self._gram = torch.zeros(size, size, dtype=torch.float64, device="cpu")
        self._cross = torch.zeros(size, width, dtype=torch.float64, device="cpu")

    def add(self) -> None:
        seen, layer = self._seen, self._seen.part.index
        features = self._predictor.features(layer, seen.residual, None, seen.routing)
        missing = seen.leaving - seen.residual - features @ self._predictor.up[0][layer].T
        scale = seen.residual.square().mean(dim=1, keepdim=True).rsqrt()
        features, missing = features * scale, missing * scale
        self._gram += (features.T @ features).double().cpu()
        self._cross += (features.T @ missing).double().cpu()

    def solve(self) -> None:
        ridge = (
            RIDGE
            * self._gram.diagonal().mean()
            * torch.eye(len(self._gram), dtype=torch.float64, device="cpu")
        )
        up = self._predictor.up[0]
        up[self._seen.part.index] += torch.linalg.solve(self._gram + ridge, self._cross).T.to(up)
