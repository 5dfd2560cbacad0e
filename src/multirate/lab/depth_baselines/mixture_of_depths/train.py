"""Mixture-of-Depths as a retrofit: routers and predictors are trained, the base is frozen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multirate.lab.depth_baselines.mixture_of_depths.modules import EPS, Routers, refuse_windows
from multirate.methods._shared.distillation import distil
from multirate.methods._shared.least_squares import LeastSquares, direction, enough
from multirate.methods._shared.objective import Objective, Report, Term
from multirate.methods._shared.teacher import Known, SlowPass, Teacher
from multirate.runtime.hf.parts import additive


class RouterObjective(Objective):
    """KL to the full model's distribution, and the predictors' binary cross-entropy towards the
    routers' choice.

    Of each text's response tokens the share `capacity` with the highest r runs a routed block; the
    others pass it by and leave no K/V there. The prompt's tokens run everything, as they do when
    decoding. The loss reaches r through x + r · f(x), whose value is that of r = 1 for those that
    run the block and r = 0 for the others: a frozen block is not to be scaled, and only at 0 does
    the gradient say what a token misses (the paper: r itself, of those that run it). [ours]
    """

    predicts = "exits"
    has_early_exit = False  # the base alone leaves nothing out

    def __init__(self, teacher: Teacher, routers: Routers) -> None:
        super().__init__(teacher)
        refuse_windows(teacher.parts.windows, routers.config.blocks)
        self.routers = routers

    @property
    def terms(self) -> list[Term]:
        return [Term(self._teacher[0].shape.num_layers, 1, 1.0)]

    def forward(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[Tensor, Report]:
        teacher, blocks = self._teacher[0], self.routers.config.blocks
        slow = teacher.slow(ids, shared=0, known=known)
        x = slow.residual[0]
        predicting = x.new_zeros((), dtype=torch.float32)
        with teacher.parts.attention():
            for i in range(teacher.shape.num_layers):
                if i not in blocks:
                    x = self._layer(i, x, slow, slow.masks[i])
                    continue
                which = blocks.index(i)
                weight = self.routers.weight(which, x)
                runs = chosen(weight.detach(), mask, self.routers.config.capacity)
                logits = self.routers.left_out(which, x[mask].detach())
                predicting = predicting + F.binary_cross_entropy_with_logits(
                    logits, (~runs[mask]).float()
                )
                moved = self._layer(i, x, slow, _seen(runs, x.dtype)) - x
                share = runs + torch.where(mask, weight - weight.detach(), 0.0)
                x = x + share[..., None].to(x.dtype) * moved
        students = teacher.norm(x[mask])[None]
        result = distil(students, slow.target(mask), teacher.head)
        loss = result.kl[0] + predicting / len(blocks)
        return loss, Report(self.terms, result, float(loss.detach()))

    def _layer(self, i: int, x: Tensor, slow: SlowPass, mask: Tensor | None) -> Tensor:
        parts = self._teacher[0].parts
        return parts.run_layer(i, x, mask, slow.position_ids, slow.rotary)


def chosen(weight: Tensor, mask: Tensor, capacity: float) -> Tensor:
    """bool [B, T]: which tokens run a block, by their router weights [B, T]: in each row the share
    `capacity` of those in `mask` with the highest, and all others.
    """
    ranked = weight.masked_fill(~mask, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    place = ranked.argsort(dim=-1)
    most = (capacity * mask.sum(-1, keepdim=True)).ceil()
    return (place < most) | ~mask


def _seen(runs: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask [B, 1, T, T] of a block that only the tokens of `runs` [B, T] have K/V in.
    Every token sees itself: the rows of the others are not used, but must not be empty.
    """
    length = runs.shape[1]
    own = torch.eye(length, dtype=torch.bool, device=runs.device)
    return additive((runs[:, None, :] | own).tril()[:, None], dtype)


@torch.no_grad()
def start_from_updates(
    teacher: Teacher, routers: Routers, batches: Iterable[tuple[Tensor, Tensor, Any]]
) -> None:
    """Every router starts as the map that best tells how far its block turns a token's residual,
    over the response rows of ``batches`` of (ids, mask, known). [ours]
    """
    blocks = routers.config.blocks
    gates = tuple(sorted({*blocks, *(i + 1 for i in blocks)}))
    # beside the residual a constant, which no ranking needs afterwards
    fits = [LeastSquares(teacher.shape.hidden_size + 1, 1) for _ in blocks]
    for ids, mask, known in enough(batches, teacher.shape.hidden_size):
        slow = teacher.slow(ids, shared=0, gates=gates, known=known)
        for i, fit in zip(blocks, fits, strict=True):
            before, after = (slow.residual[j].float()[mask] for j in (i, i + 1))
            turned = 1 - torch.cosine_similarity(before, after, dim=-1)
            fit.add(F.pad(direction(before, EPS), (0, 1), value=1.0), turned[:, None])
    for row, fit in zip(routers.router, fits, strict=True):
        # only the ranking counts: at a length of one no first step of training wipes it out
        row.copy_(F.normalize(fit.solution()[:-1, 0], dim=0))
