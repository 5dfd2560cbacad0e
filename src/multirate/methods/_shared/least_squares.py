"""Linear maps that training starts from: ridge regression over many batches of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

RIDGE = 1e-2
"""Of the mean square of the inputs: keeps the problem well posed."""
ROWS_PER_INPUT = 32
"""Rows from which a map learns what training starts from."""


class LeastSquares:
    """The matrix that best predicts `outputs` numbers from `inputs` numbers."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.squares = torch.zeros(inputs, inputs, dtype=torch.float32, device="cpu")
        self._products = torch.zeros(inputs, outputs, dtype=torch.float32, device="cpu")

    def add(self, read: Tensor, wanted: Tensor) -> None:
        """Rows [n, inputs], and what they are to give [n, outputs]."""
        self.squares += (read.T @ read).cpu()
        self._products += (read.T @ wanted).cpu()

    def solution(self) -> Tensor:
        """The matrix [inputs, outputs] with read @ matrix ≈ wanted."""
        squares = self.squares.clone()
        squares.diagonal().add_(RIDGE * squares.diagonal().mean().clamp(min=1e-6))
        return torch.linalg.solve(squares, self._products)


def enough(
    batches: Iterable[tuple[Tensor, Tensor, Any]], inputs: int
) -> Iterator[tuple[Tensor, Tensor, Any]]:
    """As many batches of (ids, mask, known) as a map of so many inputs needs: each has layers to
    run, and training goes on from there.
    """
    rows = 0
    for batch in batches:
        if rows >= ROWS_PER_INPUT * inputs:
            return
        rows += int(batch[1].sum())
        yield batch


def direction(x: Tensor, eps: float = 0.0) -> Tensor:
    """x [..., d] at a mean square of one: what a final norm makes of it, before its weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
