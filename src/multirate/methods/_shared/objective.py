"""Reports of a training objective, and how they add up over batches and processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multirate.methods._shared.distillation import Distilled, simulated_tokens_per_step
from multirate.methods._shared.teacher import Known, Teacher

BINS = 200
"""Histogram bins of scores for AUC and calibration error, so that sums over batches and processes
stay exact and small.
"""


def step_weight(step: int) -> float:
    """Loss weight of draft step 1, 2, …: each weighs 0.8 of the one before."""
    return float(0.8 ** (step - 1))


class Term(NamedTuple):
    """One (gate, draft step) of the loss and its weight."""

    gate: int
    step: int
    weight: float


@dataclass
class Report:
    """One batch, detached. ``arla`` [K, N]: predicted probabilities of agreement (ARLA, or a
    baseline's classifier), if there are any.
    """

    terms: list[Term]
    result: Distilled
    loss: float
    arla: Tensor | None = None

    def sums(self) -> Tensor:
        """[K, 4 + 4·BINS] float64: rows · (1, agreement, overlap, KL), then histograms of
        confidence and ARLA scores, each for agreeing and disagreeing rows. Sums of batches and of
        processes are sums of these.
        """
        agree, rows = self.result.agree, self.result.agree.shape[1]
        counts = (
            torch.full((len(agree),), float(rows), device=agree.device, dtype=torch.float32),
            agree.sum(1),
            self.result.overlap * rows,
            self.result.kl.detach() * rows,
        )
        table = [torch.stack([part.float() for part in counts], dim=1)]
        for score in (self.result.confidence, self.arla):
            for wanted in (agree, ~agree):
                if score is None:
                    table.append(
                        torch.zeros(len(agree), BINS, device=agree.device, dtype=torch.float32)
                    )
                    continue
                chosen = score.float().where(wanted, -1.0)  # what is below the bins is not counted
                table.append(torch.stack([torch.histc(s, BINS, 0, 1) for s in chosen]))
        return torch.cat(table, dim=1).cpu().double()  # the only wait for a GPU


class Objective(nn.Module):
    """What training minimises: (ids int64 [B, T], mask bool [B, T]) → (loss, Report).

    mask is true where a row's *next* token is a response token. A third argument, `known`, is the
    base's stored output for these samples, if any (see `Teacher.slow`).
    """

    has_arla: bool = False
    """Whether reports have predicted probabilities of agreement."""
    predicts: Literal["drafts", "exits", "experts"] = "drafts"
    """What its terms are: "drafts", whose agreement decides how many tokens a verification accepts;
    "exits", whose tokens are not verified; or "experts".
    """
    has_early_exit: bool = True
    """Whether the base alone does something comparable at the same places (`early_exit`)."""

    def __init__(self, teacher: Teacher) -> None:
        super().__init__()
        self._teacher = [teacher]  # in a list: the base's weights are not this module's parameters

    @property
    def terms(self) -> list[Term]:
        """The terms of the loss, in the order of the report's students."""
        raise NotImplementedError

    def weighted(self, losses: Tensor) -> tuple[Tensor, Tensor]:
        """The terms' losses [K] → the sum of them by weight, and of the weights: [] each."""
        every = [term.weight for term in self.terms]
        weights = torch.tensor(every, device=losses.device, dtype=torch.float32)
        return (weights * losses).sum(), weights.sum()

    def early_exit(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[list[Term], Distilled]:
        """What the base alone achieves at the same places, which training must beat."""
        raise NotImplementedError


def shift(x: Tensor) -> Tensor:
    """x [B, T, d] → the same one position later, zeros at t = 0."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


def balanced_bce(logits: Tensor, agree: Tensor) -> Tensor:
    """Class-balanced binary cross-entropy: both classes weigh one half whatever their counts. [N],
    bool [N] → [].
    """
    target = agree.float()
    loss = F.binary_cross_entropy_with_logits(logits.float(), target, reduction="none")
    positive = target.sum()
    weight = torch.where(
        agree, 0.5 / positive.clamp(min=1), 0.5 / (target.numel() - positive).clamp(min=1)
    )
    return (loss * weight).sum()


def auc(hits: Tensor, misses: Tensor) -> float | None:
    """Area under the ROC curve from score histograms [BINS] (ties in a bin count one half); None if
    one is empty.
    """
    total = float(hits.sum() * misses.sum())
    if total == 0:
        return None
    below = misses.cumsum(0) - misses
    return float((hits * (below + 0.5 * misses)).sum()) / total


def expected_calibration_error(hits: Tensor, misses: Tensor) -> float | None:
    """Mean |share of hits − score| over the bins, weighted by rows."""
    rows = hits + misses
    if float(rows.sum()) == 0:
        return None
    centre = (torch.arange(len(hits), dtype=torch.float64, device="cpu") + 0.5) / len(hits)
    return float((hits - centre * rows).abs().sum() / rows.sum())


@dataclass
class Summary:
    """Reports of many batches, summed."""

    terms: list[Term]
    has_arla: bool
    sums: Tensor

    @staticmethod
    def empty(terms: list[Term], has_arla: bool = False) -> Summary:
        return Summary(
            terms,
            has_arla,
            torch.zeros(len(terms), 4 + 4 * BINS, dtype=torch.float64, device="cpu"),
        )

    def add(self, sums: Tensor) -> None:
        """One batch's ``Report.sums()``."""
        self.sums = self.sums + sums

    def agreement(self) -> list[float]:
        """Per term: share of rows whose argmax is the full model's."""
        return (self.sums[:, 1] / self.sums[:, 0].clamp(min=1)).tolist()

    def chain(self) -> list[float]:
        """Agreement of the first gate at draft steps 1, 2, …"""
        gate = self.terms[0].gate
        return [a for a, t in zip(self.agreement(), self.terms, strict=True) if t.gate == gate]

    def to_json(self, digits: int = 4) -> dict[str, Any]:
        """What a model card needs: per term agreement, overlap, KL, AUC and ECE; simulated tokens
        per step.
        """
        rows = self.sums[:, 0].clamp(min=1)

        def rounded(x: float | None) -> float | None:
            return None if x is None else round(x, digits)

        def scores(row: Tensor, which: int) -> dict[str, float | None]:
            hits, misses = (
                row[4 + 2 * which * BINS :][:BINS],
                row[4 + (2 * which + 1) * BINS :][:BINS],
            )
            return {
                "auc": rounded(auc(hits, misses)),
                "ece": rounded(expected_calibration_error(hits, misses)),
            }

        terms = []
        for term, row, n in zip(self.terms, self.sums, rows, strict=True):
            entry: dict[str, Any] = {
                "gate": term.gate,
                "draft_step": term.step,
                "agreement": rounded(float(row[1] / n)),
                "overlap": rounded(float(row[2] / n)),
                "kl": rounded(float(row[3] / n)),
                "confidence": scores(row, 0),
            }
            if self.has_arla:
                entry["arla"] = scores(row, 1)
            terms.append(entry)
        return {
            "rows": int(self.sums[0, 0]),
            "terms": terms,
            "simulated_tokens_per_step": rounded(simulated_tokens_per_step(self.chain())),
        }
