"""Linear layers of the kernel against float64: errors below those of bf16 rows, outliers, extremes, no overflow."""

from __future__ import annotations

import ctypes

import pytest
import torch

from multirate.model.native import library
from multirate.model.native.packing import WEIGHT_NORM, Owner, fixed_point

BF16_ROUNDING = 2.0**-9


def product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    owner = Owner()
    linear = owner.linear(weight)
    y = torch.empty(len(x), linear.outputs)
    workspace = library.Workspace(2)
    library.kernel().mr_linear(
        workspace.address, ctypes.addressof(linear), x.contiguous().data_ptr(), None, 1e-5, len(x), y.data_ptr(), 0
    )
    return y[:, : len(weight)]


def weights(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=generator).to(torch.bfloat16).float()


@pytest.mark.parametrize("inputs", [64, 256, 704, 5632])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 8, 13])
def test_error_is_below_the_rounding_of_rows_to_bf16(inputs: int, rows: int) -> None:
    weight, x = weights(130, inputs), torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    exact = x.double() @ weight.double().T
    error = (product(weight, x) - exact).norm() / exact.norm()
    assert error < BF16_ROUNDING


def test_what_an_outlier_hides_is_not_lost() -> None:
    """The outlier's own weights are zero, so all of the result comes from elements a million times smaller."""
    weight, x = weights(64, 256), torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    weight[:, 7] = 0
    x[1, 7] = 1e6
    exact = x.double() @ weight.double().T
    error = (product(weight, x) - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 2 * BF16_ROUNDING


def test_no_sum_overflows_when_rows_and_weights_align() -> None:
    x = torch.cat([torch.randn(4, 512, generator=torch.Generator().manual_seed(2)), torch.ones(1, 512)])
    weight = x[:, :].to(torch.bfloat16).float().repeat(16, 1)
    x = weight[:5].clone()  # w·x = ‖w‖ ‖x‖: the largest a sum can be
    exact = x.double() @ weight.double().T
    assert ((product(weight, x) - exact).abs() / exact.abs().amax()).max() < BF16_ROUNDING


def test_zero_rows_weights_and_magnitudes() -> None:
    weight = weights(64, 64)
    weight[3] = 0
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    x[1] = 0
    x[2] *= 1e-12
    x[3] *= 1e12
    exact = x.double() @ weight.double().T
    y = product(weight, x)
    assert not y[1].any() and not y[:, 3].any()
    assert ((y - exact).norm(dim=1) <= 2 * BF16_ROUNDING * exact.norm(dim=1)).all()


def test_a_broken_row_stays_visible() -> None:
    x = torch.ones(2, 64)
    x[1, 5] = torch.nan
    y = product(weights(64, 64), x)
    assert torch.isfinite(y[0]).all() and not torch.isfinite(y[1]).any()


def test_fixed_point_weights_keep_the_bound_and_the_value() -> None:
    weight = weights(40, 300)
    weight[5, 9] = 80.0
    weight[6] = 0
    integers, units = fixed_point(weight)
    assert integers.float().norm(dim=1).max() <= WEIGHT_NORM + 300**0.5 / 2
    assert integers.abs().max() <= 32767
    assert ((integers * units[:, None] - weight).norm(dim=1) <= 1e-3 * weight.norm(dim=1)).all()
