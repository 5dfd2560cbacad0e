"""Kangaroo's objective: the same soft loss, data and budget as M2R2's, so that the comparison is
fair.

Its adapter reads true exit residuals at decode time as in training (they are slow residuals of
drafted tokens), so there are no own-draft steps to train through.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from multirate.methods._shared.distillation import Distilled, distil
from multirate.methods._shared.objective import Objective, Report, Term
from multirate.methods._shared.teacher import Known, Teacher
from multirate.methods.kangaroo.modules import KangarooAdapter


class KangarooObjective(Objective):
    """(ids [B, T], response mask [B, T]) → KL(head(h_L) ‖ adapter's distribution) over response
    rows, and report.
    """

    def __init__(self, teacher: Teacher, adapter: KangarooAdapter) -> None:
        super().__init__(teacher)
        self.stream = adapter
        self.exit = adapter.config.exit_layer

    @property
    def terms(self) -> list[Term]:
        return [Term(self.exit, 1, 1.0)]

    def forward(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[Tensor, Report]:
        """ids int64 [B, T]; mask bool [B, T], true where the row's *next* token is a response
        token; known: see ``Teacher.slow``.
        """
        teacher = self._teacher[0]
        slow = teacher.slow(ids, shared=0, gates=(self.exit,), known=known)
        students = teacher.norm(self.stream(slow.residual[self.exit].float())[mask])[
            None
        ]  # [1, N, d]
        result = distil(students, slow.target(mask), teacher.head, self.stream.draft_tokens)
        loss = result.kl.sum()
        return loss, Report(self.terms, result, float(loss.detach()))

    @torch.no_grad()
    def early_exit(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[list[Term], Distilled]:
        """The base's plain early exit at the same layer: what training must beat."""
        teacher = self._teacher[0]
        slow = teacher.slow(ids, shared=0, gates=(self.exit,), known=known)
        return self.terms, distil(
            teacher.norm(slow.residual[self.exit][mask])[None], slow.target(mask), teacher.head
        )


@torch.no_grad()
def start_from_least_squares(
    teacher: Teacher, adapter: KangarooAdapter, batches: Iterable[tuple[Tensor, Tensor, Any]]
) -> None:
    """The output norm's weight starts where it best tells the direction of h_L from that of h_E,
    channel by channel, over the response rows of ``batches`` of (ids, mask, known). [ours]

    The early exit's loss may be above that of guessing (13 nats on SmolLM2's 49,152 tokens): what
    the exit residual says confidently and wrongly begins smaller so.
    """
    gate, d = adapter.config.exit_layer, teacher.shape.hidden_size
    squares, products = (
        torch.zeros(d, dtype=torch.float32, device="cpu"),
        torch.zeros(d, dtype=torch.float32, device="cpu"),
    )
    for ids, mask, known in batches:
        slow = teacher.slow(ids, shared=0, gates=(gate,), known=known)
        final = slow.final.float()[mask]
        wanted = final * torch.rsqrt(final.square().mean(-1, keepdim=True))
        read = adapter.norm_out(slow.residual[gate].float()[mask]) / adapter.norm_out.weight
        squares += read.square().sum(0).cpu()
        products += (read * wanted).sum(0).cpu()
    adapter.norm_out.weight.copy_(products / squares.clamp(min=1e-6))
