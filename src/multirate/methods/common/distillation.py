"""KL to the full model through the frozen head, a chunk of rows at a time, and what it says about
drafting.

The gradient with respect to the hidden rows is formed in the forward pass, chunk by chunk, so [N,
V] logits never exist whole; the teacher's distribution of a chunk is computed once for all gates
and draft steps.
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


@dataclass(frozen=True)
class Head:
    """A frozen LM head: logits = sharpness · cap(scale · (x Wᵀ + bias)), cap(z) = softcap · tanh(z
    / softcap).

    Distilling at ``sharpness`` above 1 (a temperature below 1) [ours] weighs the likely tokens
    more: greedy drafts live on the argmax alone.
    """

    weight: Tensor
    """[V, d]"""
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    sharpness: float = 1.0

    def logits(self, x: Tensor) -> Tensor:
        """x [n, d] → float32 [n, V], the product in the weight's dtype."""
        z = (x.to(self.weight.dtype) @ self.weight.T).float()
        if self.bias is not None:
            z = z + self.bias.float()
        if self.scale != 1.0:
            z = z * self.scale
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        return z if self.sharpness == 1.0 else z * self.sharpness

    def pull_back(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Gradient [n, V] at ``logits`` → gradient [n, d] at x, float32."""
        if self.softcap is not None:
            grad = grad * (1 - (logits / (self.softcap * self.sharpness)).square())
        scale = self.scale * self.sharpness
        return (
            (grad * scale if scale != 1.0 else grad).to(self.weight.dtype) @ self.weight
        ).float()

    def subset(self, tokens: Tensor) -> Head:
        """The head over ``tokens`` only [n]."""
        bias = None if self.bias is None else self.bias[tokens]
        return replace(self, weight=self.weight[tokens], bias=bias)


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


class _ChunkedKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, students: Tensor, teacher: Tensor, head: Head, tokens: Tensor | None
    ) -> tuple[Tensor, ...]:
        count, rows, _ = students.shape
        draft_head = head if tokens is None else head.subset(tokens)
        need_grad = students.requires_grad
        grad = (
            torch.empty(students.shape, dtype=torch.float32, device=students.device)
            if need_grad
            else None
        )
        kl = torch.zeros(count, device=students.device)
        overlap = torch.zeros(count, device=students.device)
        agree = torch.empty(count, rows, dtype=torch.bool, device=students.device)
        confidence = torch.empty(count, rows, device=students.device)
        chunk = max(16, ELEMENTS_PER_CHUNK // head.weight.shape[0])
        for begin in range(0, rows, chunk):
            part = slice(begin, min(begin + chunk, rows))
            target = head.logits(teacher[part])
            choice = target.argmax(-1)
            # A reduced head is trained on the teacher's distribution over its own tokens.
            known = target if tokens is None else target[:, tokens]
            log_p = known.sub_(known.logsumexp(-1, keepdim=True))
            p = log_p.exp()
            negative_entropy = (p * log_p).sum()
            for k in range(count):
                z = draft_head.logits(students[k, part])
                normaliser = z.logsumexp(-1, keepdim=True)
                top, index = z.max(-1)
                kl[k] += negative_entropy - (p * z).sum() + normaliser.sum()
                agree[k, part] = (index if tokens is None else tokens[index]) == choice
                confidence[k, part] = (top - normaliser[:, 0]).exp()
                q = (z - normaliser).exp_()
                difference = q.sub_(p)
                overlap[k] += (
                    z.shape[0] - 0.5 * difference.abs().sum()
                )  # Σ min(p, q) = 1 − ½ Σ |q − p|
                if grad is not None:
                    grad[k, part] = draft_head.pull_back(difference, z)
        if grad is not None:
            ctx.save_for_backward(grad.div_(max(rows, 1)))
            ctx.dtype = students.dtype
        ctx.mark_non_differentiable(agree, confidence, overlap)
        return kl / max(rows, 1), agree, confidence, overlap / max(rows, 1)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        return (grad * upstream[:, None, None]).to(ctx.dtype), None, None, None


def distil(
    students: Tensor, teacher: Tensor, head: Head, tokens: Tensor | None = None
) -> Distilled:
    """KL(head(teacher) ‖ head(student)) of K students at once.

    students [K, N, d] and teacher [N, d] are already through the final norm; ``tokens`` [n]
    restricts the students' head (the teacher is renormalised over them; agreement is still with the
    full model's argmax).
    """
    kl, agree, confidence, overlap = _ChunkedKL.apply(students, teacher, head, tokens)
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
