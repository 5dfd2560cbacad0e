"""Trains the accelerated residual to name experts: the base and its routers are frozen.

Per mixture layer j and depth δ, q the router's distribution and S its top k for the true residual,
q̂ for p_{j−δ,δ}: KL(q ‖ q̂) + MEMBERSHIP · BCE(top k of q̂'s logits against S) + ALIGNMENT · (1 −
cos of the router's inputs).

With attention (modules.py), a row has the true K/V of the tokens before it, as it will when it is
decoded after them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multirate.errors import UserError
from multirate.methods._shared.distillation import Distilled
from multirate.methods._shared.objective import Objective, Report, Term, step_weight
from multirate.methods._shared.teacher import Known, SlowPass, Teacher
from multirate.methods.m2r2_experts.modules import Arrival, ExpertPredictor, Onward, Routing
from multirate.runtime.hf.parts import MoEParts

MEMBERSHIP = 0.5
"""Loss weight of being among a token's experts; none with attention, where it lowers recall."""
ALIGNMENT = 0.1
"""Loss weight of the router's input beside its prediction."""


@dataclass
class _Mixture:
    """A mixture layer: the norm before its router is found while it runs."""

    layer: int
    moe: MoEParts
    norm: nn.Module | None = None
    residual: Tensor | None = None  # [B, T, d] of the last pass

    def see(self, norm: nn.Module, residual: Tensor) -> None:
        self.norm, self.residual = norm, residual

    def inputs(self, residual: Tensor) -> Tensor:
        """What the router reads for this stream [N, d]."""
        assert self.norm is not None
        made: Tensor = self.norm(residual)
        return made

    @torch.no_grad()
    def routing(self, residual: Tensor) -> Routing:
        """The experts that run for this stream, and softmax over them of their logits."""
        logits, chosen = self.route(self.inputs(residual))
        return chosen, logits.gather(1, chosen).softmax(-1)

    def route(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Router logits float32 [N, E] and the experts chosen [N, k]."""
        logits, chosen = self.moe.route(inputs)
        return logits.float(), chosen


class ExpertPredictorObjective(Objective):
    """(ids [B, T], mask [B, T]) → loss, and a report whose terms are (layer whose experts are
    predicted, depth).

    In the report "agreement" is recall: each of a token's k experts counts as a row, agreeing when
    it is among the k likeliest of q̂; "overlap" is Σ min(q, q̂).
    """

    predicts = "experts"

    def __init__(self, teacher: Teacher, predictor: ExpertPredictor) -> None:
        super().__init__(teacher)
        self.stream = predictor
        self._mixtures = [
            _Mixture(part.index, part.moe) for part in teacher.parts.layers if part.moe is not None
        ]
        if len(self._mixtures) <= predictor.config.ahead:
            raise UserError(
                f"ahead is {predictor.config.ahead}; accepted: fewer than the model's "
                f"{len(self._mixtures)} mixture layers"
            )

    @property
    def terms(self) -> list[Term]:
        """By depth, then by layer."""
        depths = range(1, self.stream.config.ahead + 1)
        return [
            Term(target.layer, depth, step_weight(depth))
            for depth in depths
            for target in self._mixtures[depth:]
        ]

    def forward(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[Tensor, Report]:
        """ids int64 [B, T]; mask bool [B, T]: the rows that count; known is not used (all layers
        have to run).
        """
        rows, slow = self._residuals(ids, mask)
        onward = self._onward(slow, mask)
        state, predicted = None, []
        for mixture, residual in zip(
            self._mixtures[:-1], rows, strict=False
        ):  # the last has no one to name
            found = self.stream.step(
                mixture.layer, residual, state, None, mixture.routing(residual), onward
            )
            state = found[0]
            predicted.append(found)
        return self._judge(rows, predicted)

    @torch.no_grad()
    def early_exit(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[list[Term], Distilled]:
        """The gate of a later layer on the slow residual: what training must beat."""
        rows, _ = self._residuals(ids, mask)
        _, report = self._judge(rows, [[row] * self.stream.config.ahead for row in rows])
        return self.terms, report.result

    def _judge(self, rows: list[Tensor], predicted: list[list[Tensor]]) -> tuple[Tensor, Report]:
        terms, member_weight = self.terms, 0.0 if self.stream.config.attention else MEMBERSHIP
        with torch.no_grad():
            inputs = [m.inputs(row) for m, row in zip(self._mixtures, rows, strict=True)]
            truth = [m.route(x) for m, x in zip(self._mixtures, inputs, strict=True)]
        losses, kls, agrees, sure, overlaps = [], [], [], [], []
        index = {mixture.layer: i for i, mixture in enumerate(self._mixtures)}
        for term in terms:
            target = index[term.gate]
            mixture = self._mixtures[target]
            logits, chosen = truth[target]
            guess = predicted[target - term.step][term.step - 1]
            x = mixture.inputs(guess.to(rows[0].dtype))
            guessed, _ = mixture.route(x)
            log_q = guessed.log_softmax(-1)
            p = logits.softmax(-1)
            kl = (p * (logits.log_softmax(-1) - log_q)).sum(-1).mean()
            members = torch.zeros_like(logits).scatter_(1, chosen, 1.0)
            k = chosen.shape[1]
            top = guessed.topk(k, dim=-1).indices
            edge = guessed.topk(k + 1, dim=-1).values[:, k - 1 :].mean(-1, keepdim=True).detach()
            membership = F.binary_cross_entropy_with_logits(guessed - edge, members)
            alignment = 1 - F.cosine_similarity(x.float(), inputs[target].float(), dim=-1).mean()
            losses.append(term.weight * (kl + member_weight * membership + ALIGNMENT * alignment))
            q = log_q.exp().detach()
            hits = torch.zeros_like(members).scatter_(1, top, 1.0).gather(1, chosen) > 0
            kls.append(kl)
            agrees.append(hits.flatten())
            sure.append(q.gather(1, chosen).flatten())
            overlaps.append(torch.minimum(p, q).sum(-1).mean())
        loss = torch.stack(losses).sum() / len(self._mixtures)
        result = Distilled(
            torch.stack(kls), torch.stack(agrees), torch.stack(sure), torch.stack(overlaps)
        )
        return loss, Report(terms, result, float(loss.detach()))

    def _onward(self, slow: SlowPass, mask: Tensor) -> Onward:
        """The base's layers for the rows of ``mask`` in the pass ``slow``."""
        teacher = self._teacher[0]
        after = {mixture.layer: target for mixture, target in pairwise(self._mixtures)}

        def onward(layer: int, leaving: Tensor) -> Arrival | None:
            target = after.get(layer)
            if target is None:
                return None
            # Tokens outside the mask stay zero: no other row sees their keys, since a row's
            # own are for itself alone.
            x = leaving.new_zeros(*mask.shape, leaving.shape[-1]).masked_scatter(
                mask[..., None], leaving
            )
            x = x.to(teacher.parts.dtype)
            for i in range(layer + 1, target.layer + 1):
                x = teacher.onward(i, x, slow)
            residual = x[mask]
            return Arrival(target.layer, residual, target.routing(residual))

        return onward

    @torch.no_grad()
    def _residuals(self, ids: Tensor, mask: Tensor) -> tuple[list[Tensor], SlowPass]:
        """The stream after attention of each mixture layer, [N, d] over the rows of ``mask``, and
        the pass it is of.
        """
        with self._watching():
            slow = self._teacher[0].slow(
                ids, len(self._teacher[0].parts.layers) if self.stream.config.attention else 0
            )
        found = []
        for mixture in self._mixtures:
            assert mixture.residual is not None
            found.append(mixture.residual[mask])
            mixture.residual = None
        return found, slow

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Hooks that keep each mixture's norm and the stream that it reads."""
        handles = []
        for mixture in self._mixtures:
            handles += self._teacher[0].parts.layers[mixture.layer].before_router(mixture.see)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
