"""Linear layers (csrc/gemm.c, fixed_point.c) against float64: errors below those of bf16 rows, no
overflow.
"""

from __future__ import annotations

import pytest
import torch

from multirate.runtime.native.formats import BF16, INT12, INT16, Q8_0

from . import reference
from .harness import bf16_values, linear, randn
from .reference_packing import WEIGHT_NORM, fixed_point

BF16_ROUNDING = 2.0**-9


@pytest.mark.parametrize("inputs", [64, 256, 704, 5632])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 8, 13, 25])
@pytest.mark.parametrize("twelve", [False, True])
def test_error_is_below_the_rounding_of_rows_to_bf16(inputs: int, rows: int, twelve: bool) -> None:
    weight, x = (
        bf16_values(130, inputs),
        torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)),
    )
    exact = x.double() @ weight.double().T
    error = (linear(weight, x, twelve_bits=twelve) - exact).norm() / exact.norm()
    assert error < BF16_ROUNDING


def test_what_an_outlier_hides_is_not_lost() -> None:
    """The outlier's own weights are zero, so all of the result comes from elements a million times
    smaller.
    """
    weight, x = (
        bf16_values(64, 256),
        torch.randn(3, 256, generator=torch.Generator().manual_seed(1)),
    )
    weight[:, 7] = 0
    x[1, 7] = 1e6
    exact = x.double() @ weight.double().T
    error = (linear(weight, x) - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 2 * BF16_ROUNDING


def test_no_sum_overflows_when_rows_and_weights_align() -> None:
    x = torch.cat(
        [torch.randn(4, 512, generator=torch.Generator().manual_seed(2)), torch.ones(1, 512)]
    )
    weight = x[:, :].to(torch.bfloat16).float().repeat(16, 1)
    x = weight[:5].clone()  # w·x = ‖w‖ ‖x‖: the largest a sum can be
    exact = x.double() @ weight.double().T
    assert ((linear(weight, x) - exact).abs() / exact.abs().amax()).max() < BF16_ROUNDING


def test_zero_rows_weights_and_magnitudes() -> None:
    weight = bf16_values(64, 64)
    weight[3] = 0
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    x[1] = 0
    x[2] *= 1e-12
    x[3] *= 1e12
    exact = x.double() @ weight.double().T
    y = linear(weight, x)
    assert not y[1].any() and not y[:, 3].any()
    assert ((y - exact).norm(dim=1) <= 2 * BF16_ROUNDING * exact.norm(dim=1)).all()


def test_a_broken_row_stays_visible() -> None:
    x = torch.ones(2, 64)
    x[1, 5] = torch.nan
    y = linear(bf16_values(64, 64), x)
    assert torch.isfinite(y[0]).all() and not torch.isfinite(y[1]).any()


def test_fixed_point_weights_keep_the_bound_and_the_value() -> None:
    weight = bf16_values(40, 300)
    weight[5, 9] = 80.0
    weight[6] = 0
    integers, units = fixed_point(weight)
    assert integers.float().norm(dim=1).max() <= WEIGHT_NORM + 300**0.5 / 2
    assert integers.abs().max() <= 32767
    assert ((integers * units[:, None] - weight).norm(dim=1) <= 1e-3 * weight.norm(dim=1)).all()


def test_a_bias_a_norm_and_adding_to_what_is_there() -> None:
    weight, x, norm = bf16_values(130, 256), randn(7, 256, seed=1), randn(256, seed=2)
    bias, before = randn(130, seed=3), randn(7, 130, seed=4)
    exact = x.double() @ weight.double().T
    assert (linear(weight, x, bias) - (exact + bias)).norm() < BF16_ROUNDING * exact.norm()
    assert (linear(weight, x, into=before) - (exact + before)).norm() < BF16_ROUNDING * exact.norm()
    exact = reference.rms_norm(x.double(), norm.double(), 1e-5) @ weight.double().T
    assert (linear(weight, x, norm=norm) - exact).norm() < 2 * BF16_ROUNDING * exact.norm()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("twelve", [False, True])
def test_a_rows_bits_depend_neither_on_its_company_nor_on_threads(
    threads: int, twelve: bool
) -> None:
    weight, x = bf16_values(320, 256), randn(71, 256, seed=5)  # more than a pass: MAX_ROWS
    together = linear(weight, x, threads=threads, twelve_bits=twelve)
    for count in (1, 2, 3, 4, 5, 6, 7, 13, 24, 25):
        found = linear(weight, x[:count], twelve_bits=twelve)
        assert torch.equal(found, together[:count])
    assert torch.equal(linear(weight, x[60:], twelve_bits=twelve), together[60:])


def test_rows_with_outliers_change_no_other_rows_bits() -> None:
    """A row whose norm sits in an outlier takes the place of two in a tile."""
    weight, x = bf16_values(192, 256) * 1.001, randn(40, 256, seed=6)
    x[::3, 9] = 500.0
    together = linear(weight, x)
    for first, count in ((0, 1), (1, 1), (0, 7), (3, 24), (11, 29)):
        assert torch.equal(linear(weight, x[first : first + count]), together[first:][:count])
    exact = x.double() @ weight.double().T
    assert (together - exact).norm() < 2 * BF16_ROUNDING * exact.norm()


@pytest.mark.parametrize("inputs", [16, 64, 576, 1552])
@pytest.mark.parametrize("rows", [*range(1, 14), 16, 17, 20, 24, 25, 49, 61])
def test_weights_of_twelve_bits_give_the_bits_of_sixteen(rows: int, inputs: int) -> None:
    weight, x = bf16_values(130, inputs), randn(rows, inputs, seed=rows)
    weight[3] *= 2.0**-40  # outputs of very different sizes, and weights far from one another
    weight[5, ::3] *= 2.0**-12
    weight[6, 1] = 300.0
    weight[7] = 0
    x[rows // 2, 5] = 500.0  # outliers, which are multiplied by themselves
    x[rows // 2, 2] = -300.0
    bias = randn(130, seed=1)
    found = linear(weight, x, bias, format=INT12)
    assert torch.equal(found, linear(weight, x, bias, format=INT16, twelve_bits=False))


@pytest.mark.parametrize("rows", [1, 3, 9, 40])
def test_bf16_weights_run_beside_fixed_point_ones(rows: int) -> None:
    """Experts come from files in bf16, whatever the processor."""
    weight, x = bf16_values(130, 704), randn(rows, 704, seed=7)
    exact = x.double() @ weight.double().T
    found = linear(weight, x, format=BF16)
    assert (found - exact).norm() < BF16_ROUNDING * exact.norm()
    assert torch.equal(linear(weight, x[:1], format=BF16), found[:1])


def test_eight_bit_layers_have_bias_and_norm_too() -> None:
    weight, x, norm = bf16_values(130, 256), randn(7, 256, seed=1), randn(256, seed=2)
    bias, before = randn(130, seed=3), randn(7, 130, seed=4)
    plain = linear(weight, x, format=Q8_0)
    assert torch.allclose(linear(weight, x, bias, format=Q8_0), plain + bias, atol=1e-5)
    assert torch.allclose(linear(weight, x, into=before, format=Q8_0), plain + before, atol=1e-5)
    normed = reference.rms_norm(x.double(), norm.double(), 1e-5).float()
    found = linear(weight, x, norm=norm, format=Q8_0)
    assert (found - linear(weight, normed, format=Q8_0)).norm() <= 0.01 * found.norm()
