"""The measures against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from multirate.lab.inspection.residuals import (
    Quartiles,
    alignment,
    change_direction,
    residual_direction,
    velocity,
)

# Two tokens. The first goes (3, 4) → (3, 9) → (−9, 9): lengths 5, √90, √162; changes (0, 5) and
# (−12, 0). The second goes (1, 0) → (2, 0) → (2, 2): changes (1, 0) and (0, 2).
RESIDUALS = [
    torch.tensor([[3.0, 4.0], [1.0, 0.0]]),
    torch.tensor([[3.0, 9.0], [2.0, 0.0]]),
    torch.tensor([[-9.0, 9.0], [2.0, 2.0]]),
]


def test_velocity_is_relative_to_the_residual_that_enters() -> None:
    expected = [[5 / 5, 1.0], [12 / math.sqrt(90), 1.0]]
    assert velocity(RESIDUALS).tolist() == [pytest.approx(row) for row in expected]


def test_directions() -> None:
    expected = [[45 / (5 * math.sqrt(90)), 1.0], [54 / math.sqrt(90 * 162), math.sqrt(0.5)]]
    assert residual_direction(RESIDUALS).tolist() == [pytest.approx(row) for row in expected]
    assert change_direction(RESIDUALS).tolist() == [pytest.approx([0.0, 0.0])]
    straight = [torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([[3.0, 1.0]])]
    assert change_direction(straight).tolist() == [pytest.approx([1.0])]
    back = [torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 1.0]])]
    assert change_direction(back).tolist() == [pytest.approx([-1.0])]


def test_alignment_ends_at_one() -> None:
    expected = [
        [9 / (5 * math.sqrt(162)), math.sqrt(0.5)],
        [54 / math.sqrt(90 * 162), math.sqrt(0.5)],
        [1.0, 1.0],
    ]
    found = alignment(RESIDUALS, RESIDUALS[-1]).tolist()
    assert found == [pytest.approx(row, abs=1e-6) for row in expected]


def test_a_residual_of_zeros_is_no_division_by_zero() -> None:
    nothing = [torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2)]
    for measure in (velocity, residual_direction, change_direction):
        assert torch.isfinite(measure(nothing)).all()


def test_quartiles_are_over_the_tokens() -> None:
    found = Quartiles.of(np.array([[4.0, 1.0, 3.0, 2.0, 5.0], [0.0, 0.0, 0.0, 8.0, 0.0]]))
    assert (found.lower, found.median, found.upper) == ([2.0, 0.0], [3.0, 0.0], [4.0, 0.0])
