"""KL divergence to the full model through the frozen head, a chunk of rows at a time, and the
agreement that drafting depends on.

The gradient with respect to the hidden rows is computed in the forward pass, chunk by chunk, so [N,
V] logits never exist as a whole. The teacher's distribution of a chunk is computed once for all
gates and draft steps. If the teacher's likeliest tokens are stored (`TopTokens`), the full head is
not needed at all; with a reduced draft head that is most of a training step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

ELEMENTS_PER_CHUNK = 1 << 21
"""Logits held at once per stream (8 MiB of float32: stays in the last-level cache of a small
machine).
"""
ELEMENTS_PER_CHUNK_ON_GPU = 1 << 27
"""There a chunk costs some tens of kernel launches, so chunks are as large as memory allows easily
(512 MiB of float32).
"""


@dataclass(frozen=True)
class TopTokens:
    """The full model's k likeliest tokens of each row: its distribution, the tail left out."""

    tokens: Tensor
    """int64 [..., k], the argmax first"""
    log_probs: Tensor
    """float32 [..., k], of the whole distribution: their exponentials sum to less than one"""

    def __getitem__(self, rows: Any) -> TopTokens:
        """The rows that an index of the leading dimensions chooses."""
        return TopTokens(self.tokens[rows], self.log_probs[rows])

    def over(self, columns: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """What a student is taught: (columns int64 [n, k] of its head, probabilities [n, k] over
        these that sum to one, bool [n] whether there is any).

        columns: int64 [V], each token's place in a reduced head, -1 where it has none; None: the
        token itself.
        """
        places = self.tokens if columns is None else columns[self.tokens]
        weights = self.log_probs.masked_fill(places < 0, -torch.inf)
        known = places.amax(-1) >= 0
        probs = torch.where(known[:, None], weights, torch.zeros_like(weights)).softmax(-1)
        return places.clamp(min=0), probs * known[:, None], known


@dataclass(frozen=True)
class Head:
    """A frozen LM head: logits = cap(scale · (x Wᵀ + bias)), where cap(z) is
    softcap · tanh(z / softcap).
    """

    weight: Tensor
    """[V, d]"""
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, x: Tensor) -> Tensor:
        """x [n, d] → float32 [n, V], the product in the weight's dtype."""
        return self._finished((x.to(self.weight.dtype) @ self.weight.T).float(), self.bias)

    def logits_of(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x [..., n, d] → float32 [..., n, k], the logits of each row's own tokens [n, k]."""
        z = (self.weight[tokens].to(x.dtype) @ x[..., None])[..., 0].float()
        return self._finished(z, None if self.bias is None else self.bias[tokens])

    def _finished(self, z: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            z = z + bias.float()
        if self.scale != 1.0:
            z = z * self.scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)

    def pull_back(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Gradient [n, V] at ``logits`` → gradient [n, d] at x, float32."""
        if self.softcap is not None:
            grad = grad * (1 - (logits / self.softcap).square())
        if self.scale != 1.0:
            grad = grad * self.scale
        return (grad.to(self.weight.dtype) @ self.weight).float()

    def subset(self, tokens: Tensor) -> Head:
        """The head over ``tokens`` only [n]."""
        bias = None if self.bias is None else self.bias[tokens]
        return replace(self, weight=self.weight[tokens], bias=bias)

    def own_start(self, tokens: Tensor | None = None) -> Tensor:
        """What a student's own head over ``tokens`` [n] (None: all) starts as: float32 [n, d]."""
        rows = self.weight if tokens is None else self.weight[tokens.to(self.weight.device)]
        return rows.detach().float() * self.scale

    def in_float32(self) -> Head:
        """The head with a weight in float32."""
        return replace(self, weight=self.weight.float())


@dataclass
class Distilled:
    """KL of K students against one teacher over the same N rows."""

    kl: Tensor
    """[K] mean over rows, differentiable"""
    agree: Tensor
    """bool [K, N]: the student's argmax is the full model's"""
    confidence: Tensor
    """[K, N]: the student's top-1 probability"""
    overlap: Tensor
    """[K]: mean of Σ min(p, q), the acceptance rate of speculative sampling at temperature 1"""


@dataclass
class _Target:
    """The teacher's distribution of a chunk of rows over the students' outputs."""

    probs: Tensor
    """[n, outputs], or [n, k] at `columns`"""
    negative_entropy: Tensor
    """[] sum over rows"""
    choice: Tensor
    """[n] the full model's argmax"""
    columns: Tensor | None = None
    """[n, k]; None: all outputs in order"""
    known: Tensor | None = None
    """[n] rows that are taught something; None: all"""

    @staticmethod
    def dense(logits: Tensor, tokens: Tensor | None) -> _Target:
        choice = logits.argmax(-1)
        # A reduced head is trained on the teacher's distribution over its own tokens.
        known = logits if tokens is None else logits[:, tokens]
        log_p = known.sub_(known.logsumexp(-1, keepdim=True))
        p = log_p.exp()
        return _Target(p, (p * log_p).sum(), choice)

    @staticmethod
    def kept(top: TopTokens, columns: Tensor | None) -> _Target:
        places, p, known = top.over(columns)
        return _Target(p, torch.xlogy(p, p).sum(), top.tokens[:, 0], places, known)

    def expected(self, z: Tensor) -> Tensor:
        """Sum over rows of the mean of z [n, outputs] under the teacher."""
        return (self.probs * (z if self.columns is None else z.gather(1, self.columns))).sum()

    def taught(self, per_row: Tensor) -> Tensor:
        """The sum of per_row [n] over the rows that are taught something."""
        return (per_row if self.known is None else per_row * self.known).sum()

    def subtract_from(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """q [n, outputs], changed in place → (q - p, sum of min(p, q))."""
        if self.columns is None or self.known is None:
            difference = q.sub_(self.probs)
            # sum min(p, q) = 1 - 1/2 sum |q - p|
            return difference, len(q) - 0.5 * difference.abs().sum()
        overlap = torch.minimum(self.probs, q.gather(1, self.columns)).sum()
        q.mul_(self.known[:, None])
        return q.scatter_add_(1, self.columns, -self.probs), overlap


class _ChunkedKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        students: Tensor,
        teacher: Tensor | TopTokens,
        head: Head,
        tokens: Tensor | None,
        own: Tensor | None,
    ) -> tuple[Tensor, ...]:
        count, rows, _ = students.shape
        if own is not None:
            draft_head = Head(own)
        else:
            draft_head = head if tokens is None else head.subset(tokens)
        grad_own = None
        if own is not None and own.requires_grad:
            grad_own = torch.zeros(count, *own.shape, device=own.device, dtype=torch.float32)
        columns = None
        if tokens is not None and isinstance(teacher, TopTokens):
            columns = torch.full((len(head.weight),), -1, device=tokens.device, dtype=torch.int64)
            columns[tokens] = torch.arange(len(tokens), device=tokens.device)
        need_grad = students.requires_grad
        grad = (
            torch.empty(students.shape, dtype=torch.float32, device=students.device)
            if need_grad
            else None
        )
        kl = torch.zeros(count, device=students.device, dtype=torch.float32)
        overlap = torch.zeros(count, device=students.device, dtype=torch.float32)
        agree = torch.empty(count, rows, dtype=torch.bool, device=students.device)
        confidence = torch.empty(count, rows, device=students.device, dtype=torch.float32)
        widest = draft_head if isinstance(teacher, TopTokens) else head
        on_cpu = students.device.type == "cpu"
        elements = ELEMENTS_PER_CHUNK if on_cpu else ELEMENTS_PER_CHUNK_ON_GPU
        chunk = max(16, elements // len(widest.weight))
        for begin in range(0, rows, chunk):
            part = slice(begin, min(begin + chunk, rows))
            if isinstance(teacher, TopTokens):
                target = _Target.kept(teacher[part], columns)
            else:
                target = _Target.dense(head.logits(teacher[part]), tokens)
            for k in range(count):
                z = draft_head.logits(students[k, part])
                top, index = z.max(-1)
                q = (z - top[:, None]).exp_()
                total = q.sum(-1)
                normaliser = top + total.log()
                kl[k] += target.negative_entropy - target.expected(z) + target.taught(normaliser)
                agree[k, part] = (index if tokens is None else tokens[index]) == target.choice
                confidence[k, part] = total.reciprocal()
                difference, common = target.subtract_from(q.div_(total[:, None]))
                overlap[k] += common
                if grad is not None:
                    grad[k, part] = draft_head.pull_back(difference, z)
                if grad_own is not None:
                    grad_own[k].addmm_(difference.T, students[k, part].float())
        ctx.grad_own = None if grad_own is None else grad_own.div_(max(rows, 1))
        if grad is not None:
            ctx.save_for_backward(grad.div_(max(rows, 1)))
            ctx.dtype = students.dtype
        ctx.mark_non_differentiable(agree, confidence, overlap)
        return kl / max(rows, 1), agree, confidence, overlap / max(rows, 1)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        own = None if ctx.grad_own is None else torch.tensordot(upstream, ctx.grad_own, 1)
        return (grad * upstream[:, None, None]).to(ctx.dtype), None, None, None, own


def distil(
    students: Tensor,
    teacher: Tensor | TopTokens,
    head: Head,
    tokens: Tensor | None = None,
    own: Tensor | None = None,
) -> Distilled:
    """KL(head(teacher) ‖ head(student)) of K students at once.

    students [K, N, d] and teacher [N, d] have passed the final norm. ``tokens`` [n] restricts the
    students' head; the teacher is renormalised over them, and agreement is still with the full
    model's argmax. A teacher given by its rows' likeliest tokens is renormalised over these; rows
    without any token in the students' head teach nothing. own: weights [n, d] of the students' own
    head over ``tokens``, trained with them; None: the model's head.
    """
    kl, agree, confidence, overlap = _ChunkedKL.apply(students, teacher, head, tokens, own)
    return Distilled(kl, agree, confidence, overlap)


def simulated_tokens_per_step(agreement: Sequence[float], chain: int = 5) -> float:
    """Tokens per verify step of a chain of ``chain`` drafts, the bonus token included: 1 + Σ_k Π_{s
    ≤ k} a_s.

    ``agreement[s − 1]`` is the top-1 agreement of draft step s; deeper steps than measured count as
    the last one.
    """
    total, product = 1.0, 1.0
    for k in range(chain):
        product *= agreement[min(k, len(agreement) - 1)]
        total += product
    return total
