"""Packed weights of floats (csrc/pack.c) against plain PyTorch's, byte for byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from multirate.runtime.native import abi, library
from multirate.runtime.native.formats import BF16, INT12, INT16, Q4_1, Q8_0, WeightFormat
from multirate.runtime.native.packing import Owner, Slabs, padded

from . import reference_packing as reference
from .harness import bf16_values, linear, randn


def lies_at(address: abi.CData, size: int, dtype: torch.dtype) -> Tensor:
    content = bytes(abi.ffi.buffer(abi.ffi.cast("char *", address), size))
    return torch.frombuffer(bytearray(content), dtype=dtype)


def packed(weight: Tensor, format: WeightFormat, threads: int = 2) -> tuple[Tensor, Tensor | None]:
    """The weights, as bytes, and their scales, that Owner packs."""
    owner = Owner(format, twelve_bits=False)
    owner.workspace = library.Workspace(threads)
    made = owner.linear(weight)
    assert (made.outputs, made.inputs, made.format) == (
        padded(len(weight)),
        weight.shape[1],
        format.number,
    )
    content = lies_at(made.weight, format.weight_bytes(made.outputs, made.inputs), torch.uint8)
    if format == BF16:
        assert made.scale == abi.NULL
        return content, None
    return content, lies_at(made.scale, made.outputs * 4, torch.float32)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def check(content: Tensor, scales: Tensor | None, weight: Tensor, format: WeightFormat) -> None:
    """Against plain PyTorch."""
    expected, units = reference.packed(weight, format)
    assert (scales is None) == (units is None)
    if scales is not None and units is not None:
        assert torch.equal(scales, units)
    assert torch.equal(content, bytes_of(expected))


def odd_weights(outputs: int, inputs: int) -> Tensor:
    """Outputs of very different sizes, one of zeros, one with an outlier."""
    weight = bf16_values(outputs, inputs, seed=inputs)
    weight[3] *= 2.0**-40
    weight[5, ::3] *= 2.0**-12
    weight[6, 1] = 300.0
    weight[7] = 0
    return weight


@pytest.mark.parametrize("layout", [BF16, INT16, INT12], ids=lambda one: one.name)
@pytest.mark.parametrize("inputs", [8, 32, 72, 576])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("threads", [1, 3])
def test_weights_are_laid_out_as_drawn(
    layout: WeightFormat, inputs: int, dtype: torch.dtype, threads: int
) -> None:
    weight = odd_weights(130, inputs)
    check(*packed(weight.to(dtype), layout, threads=threads), weight, layout)


def test_weights_that_are_no_bf16_numbers() -> None:
    weight = randn(70, 96) * torch.exp(3 * randn(70, 1, seed=1))
    check(*packed(weight, INT16), weight, INT16)


def test_a_weight_that_is_not_contiguous_and_one_of_half_precision() -> None:
    weight = bf16_values(64, 130)
    for other in (weight.T, weight.to(torch.bfloat16).T, weight.T.half()):
        content, _ = packed(other, INT16)
        assert torch.equal(content, bytes_of(reference.packed(other.float(), INT16)[0]))


@given(st.data())
def test_what_fits_into_twelve_bits(data: st.DataObject) -> None:
    """A sign, eight bits and a shift of at most 7; nothing with a ninth bit."""
    sizes = data.draw(st.lists(st.integers(0, 255), min_size=8, max_size=8))
    shifts = data.draw(st.lists(st.integers(0, 6), min_size=8, max_size=8))
    signs = data.draw(st.lists(st.sampled_from([-1, 1]), min_size=8, max_size=8))
    pairs = zip(sizes, shifts, signs, strict=True)
    # the first one makes the unit 1: 2^14 is the largest number that a unit of 2 is not needed for
    row = [2.0**14, *((n << s) * sign for n, s, sign in pairs), *([0.0] * 7)]
    weight = torch.tensor([row])
    content, units = packed(weight, INT12)
    assert units is not None and units[0] == 1
    assert torch.equal(content, bytes_of(reference.packed(weight, INT12)[0]))
    weight[0, data.draw(st.integers(1, 15))] = 257.0
    assert Owner(INT16).linear(weight).format == INT16.number


def test_only_what_fits_is_packed_in_twelve_bits() -> None:
    if not library.kernel().mr_int12_products():
        pytest.skip("weights of 16 bits are faster here")
    weight = bf16_values(130, 64)
    owner = Owner(INT16)
    assert owner.linear(weight).format == INT12.number
    assert owner.saved_bytes == 192 * 64 // 2
    finer = weight.clone()
    finer[9, 9] = 1 + 2.0**-12
    assert owner.linear(finer).format == INT16.number
    assert owner.linear(weight[:, :60]).format == INT16.number
    assert Owner(INT16, twelve_bits=False).linear(weight).format == INT16.number
    assert owner.saved_bytes == 192 * 64 // 2


@pytest.mark.parametrize("layout", [INT16, BF16], ids=lambda one: one.name)
def test_inputs_that_a_format_does_not_take(layout: WeightFormat) -> None:
    with pytest.raises(
        library.NativeUnavailable, match=r"with 63 inputs, which is not a multiple of"
    ):
        Owner(layout).linear(bf16_values(70, 63))


def test_layers_without_whole_blocks_keep_sixteen_bits() -> None:
    owner = Owner(Q8_0)
    assert owner.linear(bf16_values(70, 64)).format == Q8_0.number
    assert owner.linear(bf16_values(70, 80)).format != Q8_0.number


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("layout", [BF16, INT16, Q8_0, Q4_1], ids=lambda one: one.name)
def test_a_broken_weight_stays_visible(layout: WeightFormat, broken: float) -> None:
    weight, x = bf16_values(70, 64), randn(3, 64, seed=1)
    weight[9, 5] = broken
    y = linear(weight, x, format=layout)
    assert not torch.isfinite(y[:, 9]).any()
    assert torch.isfinite(y[:, :9]).all() and torch.isfinite(y[:, 10:]).all()


def test_bounds_of_a_screen() -> None:
    weight = odd_weights(200, 96)
    owner = Owner()  # keeps them alive
    screen = owner.screen(weight, None)
    error, norm = (lies_at(part, 4 * 256, torch.float32) for part in (screen.error, screen.norm))
    for found, true in zip((error, norm), reference.screening_norms(weight), strict=True):
        found = found[:200].double()
        assert ((found >= true) & (found <= 1.0003 * true + 1e-30)).all()
    assert not error[200:].any() and not norm[200:].any()


def test_rooms_of_slabs_do_not_overlap() -> None:
    slabs = Slabs()
    for size in (100, 64, 1):
        slabs.take(size).fill_(size)
        assert slabs.room(10).data_ptr() == slabs.room(20).data_ptr()  # nobody has taken it
    first = slabs.take(40 << 20)  # more than a slab
    other = slabs.take(7)
    assert first.data_ptr() % 64 == other.data_ptr() % 64 == 0
    first.fill_(1)
    other.fill_(2)
    assert first.min() == first.max() == 1
