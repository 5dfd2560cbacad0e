"""The classifiers' objective: balanced binary cross-entropy of "this exit says what the last layer
says", at every exit. The backbone is frozen, and nothing else is trained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from multirate.lab.depth_baselines._shared.multi_exit import ExitObjective
from multirate.methods._shared.distillation import distil
from multirate.methods._shared.objective import Report, balanced_bce
from multirate.methods._shared.teacher import Known


class CalmObjective(ExitObjective):
    """See the module's docstring. The report's agreement is that of the base's plain exits."""

    has_arla = True
    has_early_exit = False  # the students are the base's own exits

    def forward(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[Tensor, Report]:
        """See Objective."""
        teacher, classifiers = self._teacher[0], self.module
        slow = teacher.slow(ids, shared=0, gates=classifiers.exits, known=known)
        normed = self.normed(slow, mask)
        with torch.no_grad():
            result = distil(normed, slow.target(mask), teacher.head, classifiers.draft_tokens)
        logits = classifiers(normed.float())
        each = [balanced_bce(row, agree) for row, agree in zip(logits, result.agree, strict=True)]
        loss = torch.stack(each).mean()
        scores = logits.detach().float().sigmoid()
        return loss, Report(self.terms, result, float(loss.detach()), scores)
