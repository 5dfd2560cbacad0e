"""The classifiers' objective: balanced binary cross-entropy of "this exit says what the last layer
says", at every exit. The backbone is frozen, and nothing else is trained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from multirate.lab.depth_baselines.calm.modules import ExitClassifiers
from multirate.methods._shared.distillation import distil
from multirate.methods._shared.objective import Objective, Report, Term, balanced_bce
from multirate.methods._shared.teacher import Known, Teacher


class CalmObjective(Objective):
    """See the module's docstring. The report's agreement is that of the base's plain exits."""

    has_arla = True
    predicts = "exits"
    has_early_exit = False  # the students are the base's own exits

    def __init__(self, teacher: Teacher, classifiers: ExitClassifiers) -> None:
        super().__init__(teacher)
        self.classifiers = classifiers

    @property
    def terms(self) -> list[Term]:
        return [Term(exit, 1, 1.0) for exit in self.classifiers.config.exits]

    def forward(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[Tensor, Report]:
        """See Objective."""
        teacher, exits = self._teacher[0], self.classifiers.config.exits
        slow = teacher.slow(ids, shared=0, gates=exits, known=known)
        normed = torch.stack([teacher.norm(slow.residual[exit][mask]) for exit in exits])
        with torch.no_grad():
            result = distil(normed, slow.target(mask), teacher.head, self.classifiers.draft_tokens)
        logits = self.classifiers(normed.float())
        each = [balanced_bce(row, agree) for row, agree in zip(logits, result.agree, strict=True)]
        loss = torch.stack(each).mean()
        scores = logits.detach().float().sigmoid()
        return loss, Report(self.terms, result, float(loss.detach()), scores)
