"""Muon, many matrices at once, in the precision that the device multiplies fast.

``torch.optim.Muon`` (Keller Jordan's optimizer) orthogonalises each update in bfloat16, one matrix
at a time; on a processor that emulates bfloat16 this took longer than forward and backward
together, so it takes float32 there. Nor does it take stacks of matrices. Same update and settings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from multirate.training.precision import low_precision

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration: steepest at zero (Jordan et al.; torch's defaults)."""


def orthogonalised(matrices: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """[n, r, c] with r ≤ c → the nearest semi-orthogonal matrices, roughly (singular values 0.7 to
    1.2).
    """
    a, b, c = COEFFICIENTS
    x = matrices / matrices.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """For matrices [out, in] and stacks of them [E, out, in] (experts, each a matrix of its own);
    the step is scaled to AdamW's typical size (0.2 · √max(out, in)).
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        if any(p.ndim not in (2, 3) for group in self.param_groups for p in group["params"]):
            raise ValueError("Muon takes matrices and stacks of matrices only")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every matrix that has a gradient (Nesterov momentum)."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            same: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    same[min(p.shape[-2:]), max(p.shape[-2:])].append(p)
            for matrices in same.values():
                self._update(matrices, group)
        return loss

    def _update(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        momentum, wide = group["momentum"], []
        for p in matrices:
            assert p.grad is not None
            buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            buffer.lerp_(p.grad, 1 - momentum)
            update = p.grad.lerp(buffer, momentum)
            update = update if update.ndim == 3 else update[None]
            wide.append(update.mT if update.shape[-2] > update.shape[-1] else update)
        stacked = torch.cat(wide)
        updates = orthogonalised(stacked.to(low_precision(stacked.device))).split(
            [len(part) for part in wide]
        )
        for p, update in zip(matrices, updates, strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            scale = group["lr"] * 0.2 * max(p.shape[-2:]) ** 0.5
            p.add_(
                (update.mT if p.shape[-2] > p.shape[-1] else update).reshape(p.shape).to(p.dtype),
                alpha=-scale,
            )
