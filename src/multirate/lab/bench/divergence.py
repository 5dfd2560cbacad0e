"""Is an answer that differs from the base model's a rounding near-tie, or a bug?

Two correct evaluations of the same model in bf16 round differently (another batch shape is enough),
so their greedy tokens may part where two logits are almost equal. Everything else that differs is a
bug.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

import torch

from multirate.runtime.quantised import runnable


@dataclass(frozen=True)
class Divergence:
    """The first place where an answer parts from the reference.

    `position` counts new tokens from 0. `gap` and `bound` are in logits and None where no tie can
    explain the difference (an answer that ends early or runs on), or none has to: a lossy method's
    is "lossy".
    """

    kind: Literal["near-tie", "bug", "lossy"]
    position: int
    reference: int | None
    answer: int | None
    gap: float | None = None
    bound: float | None = None


def first_difference(reference: Sequence[int], answer: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter length when one is a prefix of the other,
    None when equal.
    """
    shorter = min(len(reference), len(answer))
    for index in range(shorter):
        if reference[index] != answer[index]:
            return index
    return None if len(reference) == len(answer) else shorter


class Judge:
    """Classifies first divergences by the model itself, evaluated at a higher precision.

    Criterion: with z the logits at higher precision (float32 for bf16 and fp16 models, float64 for
    float32 ones) after the common prefix, both tokens that were chosen must lie within `bound` of
    max(z). Both logits can move by the model's rounding error e in opposite directions, so bound =
    2·e + u·|max z|, where e = max over the vocabulary of |z_dtype − z| is the error that the
    model's own forward pass shows on this very prefix, and u = eps of the dtype allows for one more
    rounding of the logits themselves.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._exact: Any = None

    @torch.no_grad()
    def classify(
        self,
        prompt: Sequence[int],
        reference: Sequence[int],
        answer: Sequence[int],
        lossless: bool = True,
    ) -> Divergence | None:
        """None when the answers are equal, else the divergence. All are token ids; answers hold new
        tokens only. lossless: whether a difference wants explaining, for which the model runs.
        """
        position = first_difference(reference, answer)
        if position is None:
            return None
        if not lossless or position >= len(reference) or position >= len(answer):
            return Divergence(
                "bug" if lossless else "lossy",
                position,
                reference[position] if position < len(reference) else None,
                answer[position] if position < len(answer) else None,
            )
        self._model = runnable(self._model)
        prefix = [*prompt, *reference[:position]]
        chosen = (reference[position], answer[position])
        rounded = _last_logits(self._model, prefix)
        exact = _last_logits(self._exact_model(), prefix)
        top = float(exact.max())
        gap = top - min(float(exact[token]) for token in chosen)
        error = float((rounded - exact).abs().max())
        bound = 2 * error + torch.finfo(self._model.dtype).eps * abs(top)
        return Divergence("near-tie" if gap <= bound else "bug", position, *chosen, gap, bound)

    def _exact_model(self) -> Any:
        # A copy: casting in place would also round the float32 buffers (rotary frequencies) on the
        # way back.
        if self._exact is None:
            higher = torch.float64 if self._model.dtype == torch.float32 else torch.float32
            self._exact = copy.deepcopy(self._model).to(higher)
        return self._exact


def _last_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """float64 [V]: the model's logits after `ids`, which has at least one token."""
    tokens = torch.tensor([list(ids)], dtype=torch.long, device=model.device)
    # the head of the last one alone, where the model can
    last = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    return model(input_ids=tokens, use_cache=False, **last).logits[0, -1].double()
