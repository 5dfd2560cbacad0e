"""Linear layers (csrc/gemm.c, fixed_point.c) against float64: errors below those of bf16 rows, no
overflow.
"""

from __future__ import annotations

import pytest
import torch

from multirate.model.native import library
from multirate.model.native.packing import BF16, INT8, INT16, W4A8, W4A16, W8A8, W8A16

from . import reference
from .harness import bf16_values, byte_products, linear, of_half_bytes, randn
from .reference_packing import (
    WEIGHT_NORM,
    bytes_by_block,
    fixed_point,
    half_bytes_by_block,
    nearest_half_bytes,
)

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


def twelve_bits() -> None:
    if not library.kernel().mr_int12_products():
        pytest.skip("this variant has no weights of 12 bits")


@pytest.mark.parametrize("inputs", [16, 64, 576, 1552])
@pytest.mark.parametrize("rows", [*range(1, 14), 16, 17, 20, 24, 25, 49, 61])
def test_weights_of_twelve_bits_give_the_bits_of_sixteen(rows: int, inputs: int) -> None:
    twelve_bits()
    weight, x = bf16_values(130, inputs), randn(rows, inputs, seed=rows)
    weight[3] *= 2.0**-40  # outputs of very different sizes, and weights far from one another
    weight[5, ::3] *= 2.0**-12
    weight[6, 1] = 300.0
    weight[7] = 0
    x[rows // 2, 5] = 500.0  # outliers, which are multiplied by themselves
    x[rows // 2, 2] = -300.0
    bias = randn(130, seed=1)
    found = linear(weight, x, bias, layout=INT16)
    assert torch.equal(found, linear(weight, x, bias, layout=INT16, twelve_bits=False))


@pytest.mark.parametrize("rows", [1, 3, 9, 40])
def test_bf16_weights_run_beside_fixed_point_ones(rows: int) -> None:
    """Experts come from files in bf16, whatever the processor."""
    weight, x = bf16_values(130, 704), randn(rows, 704, seed=7)
    exact = x.double() @ weight.double().T
    found = linear(weight, x, layout=BF16)
    assert (found - exact).norm() < BF16_ROUNDING * exact.norm()
    assert torch.equal(linear(weight, x[:1], layout=BF16), found[:1])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 13, 31])
def test_int8_weights(rows: int) -> None:
    if not library.kernel().mr_integer_products():
        pytest.skip("this variant multiplies no integers")
    weight, x = bf16_values(130, 704), randn(rows, 704, seed=8)
    x[0, 3] = 400.0
    integers, units = fixed_point(weight, torch.int8)
    exact = x.double() @ reference.dequantised(integers, units).T
    found = linear(weight, x, layout=INT8)
    assert ((found - exact).norm(dim=1) < 2 * BF16_ROUNDING * exact.norm(dim=1)).all()
    assert torch.equal(linear(weight, x[:1], layout=INT8), found[:1])
    close = x.double() @ weight.double().T
    assert (found - close).norm() < 0.02 * close.norm()


@pytest.mark.parametrize("layout", [W8A8, W8A16])
@pytest.mark.parametrize("inputs", [32, 64, 576, 1568])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 12, 13, 25, 61])
def test_eight_bit_rows_and_weights(rows: int, inputs: int, layout: int) -> None:
    byte_products()
    weight, x = bf16_values(130, inputs), bf16_values(rows, inputs, seed=rows)
    x[0, 3] = 400.0  # no other block loses by an outlier
    integers, units = bytes_by_block(weight)
    terms = 2 if layout == W8A16 else 1
    kept = reference.rounded_by_block(x, units.shape[1], terms)
    exact = kept @ reference.dequantised_by_block(integers, units).T
    found = linear(weight, x, layout=layout)
    assert ((found - exact).norm(dim=1) < 1e-4 * exact.norm(dim=1)).all()
    close = x.double() @ weight.double().T
    assert (found - close)[1:].norm() <= 0.015 * close[1:].norm()


BYTE_LAYOUTS = [W8A8, W8A16, W4A8, W4A16]


@pytest.mark.parametrize("layout", [W4A8, W4A16])
@pytest.mark.parametrize("inputs", [32, 64, 576, 1536])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 12, 13, 25, 61])
def test_weights_of_four_bits(rows: int, inputs: int, layout: int) -> None:
    byte_products()
    weight, x = of_half_bytes(130, inputs), bf16_values(rows, inputs, seed=rows)
    x[0, 3] = 400.0  # no other block loses by an outlier
    terms = 2 if layout == W4A16 else 1
    integers, scales = half_bytes_by_block(weight)
    unit, least = scales.double().repeat_interleave(32, dim=1).unbind(dim=2)
    exact = reference.rounded_by_block(x, inputs // 32, terms) @ (integers * unit + least).T
    found = linear(weight, x, layout=layout)
    assert ((found - exact).norm(dim=1) < 1e-4 * exact.norm(dim=1)).all()
    close = x.double() @ weight.double().T
    sizes = x.norm(dim=1, keepdim=True) * weight.norm(dim=1)
    off = 0.01 if layout == W4A8 else 0.004
    assert (found - close)[1:].norm() <= off * sizes[1:].norm()


def test_the_nearest_weights_of_four_bits() -> None:
    """Of other weights: none is as far off as a step of its block."""
    weight = randn(100, 96)
    integers, scales = nearest_half_bytes(weight)
    unit, least = scales.float().repeat_interleave(32, dim=1).unbind(dim=2)
    blocks = weight.view(100, -1, 32)
    step = ((blocks.amax(2) - blocks.amin(2)) / 15).repeat_interleave(32, dim=1)
    off = (integers * unit + least - weight).abs()
    assert (off < step).all() and off.mean() < 0.3 * step.mean()
    assert integers.min() >= 0 and integers.max() == 15


@pytest.mark.parametrize("layout", BYTE_LAYOUTS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_an_eight_bit_rows_bits_do_not_depend_on_its_company(threads: int, layout: int) -> None:
    byte_products()
    weight, x = bf16_values(320, 256), randn(71, 256, seed=5)
    together = linear(weight, x, threads=threads, layout=layout)
    for count in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 25):
        assert torch.equal(linear(weight, x[:count], layout=layout), together[:count])
    assert torch.equal(linear(weight, x[60:], layout=layout), together[60:])


@pytest.mark.parametrize("layout", BYTE_LAYOUTS)
def test_eight_bits_of_zeros_extremes_and_what_is_not_finite(layout: int) -> None:
    byte_products()
    weight, x = bf16_values(64, 64), randn(5, 64, seed=3)
    weight[3] = 0
    x[1] = 0
    x[2, 40] = torch.nan
    x[3, 7] = torch.inf
    x[4] *= 1e12
    y = linear(weight, x, layout=layout)
    assert not y[1].any() and not y[[0, 1, 4], 3].any()
    assert not torch.isfinite(y[2]).any() and not torch.isfinite(y[3]).any()
    close = x[4].double() @ weight.double().T
    off = 0.015 if layout in (W8A8, W8A16) else 0.12
    assert (y[4] - close).norm() <= off * close.norm()


def test_eight_bit_layers_have_bias_and_norm_too() -> None:
    byte_products()
    weight, x, norm = bf16_values(130, 256), randn(7, 256, seed=1), randn(256, seed=2)
    bias, before = randn(130, seed=3), randn(7, 130, seed=4)
    plain = linear(weight, x, layout=W8A8)
    assert torch.allclose(linear(weight, x, bias, layout=W8A8), plain + bias, atol=1e-5)
    assert torch.allclose(linear(weight, x, into=before, layout=W8A8), plain + before, atol=1e-5)
    normed = reference.rms_norm(x.double(), norm.double(), 1e-5).float()
    found = linear(weight, x, norm=norm, layout=W8A8)
    assert (found - linear(weight, normed, layout=W8A8)).norm() <= 0.01 * found.norm()
