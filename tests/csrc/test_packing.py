"""Packed weights (csrc/pack.c) against plain PyTorch's: byte for byte, but for those of four bits,
whose units are sums that may be added in another order.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from multirate.model.native import abi, library
from multirate.model.native.packing import (
    BF16,
    INT8,
    INT12,
    INT16,
    W4A8,
    W4A16,
    W8A8,
    W8A16,
    Owner,
    Slabs,
    padded,
)

from . import reference_packing as reference
from .harness import bf16_values, byte_products, linear, of_half_bytes, randn

BITS = {BF16: 16, INT16: 16, INT12: 12, INT8: 8, W8A8: 8, W4A8: 4, W4A16: 4}
OF_SCALES = {W8A8: torch.bfloat16, W4A8: torch.float16, W4A16: torch.float16}


def lies_at(address: abi.CData, size: int, dtype: torch.dtype) -> Tensor:
    content = bytes(abi.ffi.buffer(abi.ffi.cast("char *", address), size))
    return torch.frombuffer(bytearray(content), dtype=dtype)


def packed(
    weight: Tensor, layout: int, half_bytes: bool = False, threads: int = 2
) -> tuple[Tensor, Tensor | None]:
    """The weights, as bytes, and their scales, that Owner packs."""
    owner = Owner(layout, half_bytes=half_bytes, twelve_bits=False)
    owner.workspace = library.Workspace(threads)
    if layout == INT12:
        owner.layout, owner.twelve_bits = INT16, True
    made = owner.linear(weight)
    assert (made.outputs, made.inputs, made.format) == (
        padded(len(weight)),
        weight.shape[1],
        layout,
    )
    count = made.outputs * made.inputs
    content = lies_at(made.weight, count * BITS[layout] // 8, torch.uint8)
    if layout == BF16:
        assert made.scale == abi.NULL
        return content, None
    blocks = -(-made.inputs // 32)
    each = {W8A8: 2 * blocks, W4A8: 4 * blocks, W4A16: 4 * blocks}.get(layout, 4)
    scales = lies_at(made.scale, made.outputs * each, OF_SCALES.get(layout, torch.float32))
    return content, scales


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def check(content: Tensor, scales: Tensor | None, weight: Tensor, layout: int) -> None:
    """Against plain PyTorch. INT8: a unit is a norm, whose sum may be added in another order."""
    expected, units = reference.packed(weight, layout)
    assert (scales is None) == (units is None)
    if scales is not None and units is not None:
        near = 1e-6 if layout == INT8 else 0
        assert torch.allclose(scales, units.contiguous().view(-1), rtol=near, atol=0)
    same = content == bytes_of(expected)
    assert same.float().mean() > 0.999 if layout == INT8 else same.all()


def odd_weights(outputs: int, inputs: int) -> Tensor:
    """Outputs of very different sizes, one of zeros, one with an outlier."""
    weight = bf16_values(outputs, inputs, seed=inputs)
    weight[3] *= 2.0**-40
    weight[5, ::3] *= 2.0**-12
    weight[6, 1] = 300.0
    weight[7] = 0
    return weight


@pytest.mark.parametrize("layout", [BF16, INT16, INT12, INT8, W8A8])
@pytest.mark.parametrize("inputs", [8, 32, 72, 576])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("threads", [1, 3])
def test_weights_are_laid_out_as_drawn(
    layout: int, inputs: int, dtype: torch.dtype, threads: int
) -> None:
    if layout == INT12 and not library.kernel().mr_int12_products():
        pytest.skip("this variant has no weights of 12 bits")
    weight = odd_weights(130, inputs)
    check(*packed(weight.to(dtype), layout, threads=threads), weight, layout)


@pytest.mark.parametrize("layout", [INT16, INT8, W8A8])
def test_weights_that_are_no_bf16_numbers(layout: int) -> None:
    weight = randn(70, 96) * torch.exp(3 * randn(70, 1, seed=1))
    check(*packed(weight, layout), weight, layout)


def test_a_weight_that_is_not_contiguous_and_one_of_half_precision() -> None:
    weight = bf16_values(64, 130)
    for other in (weight.T, weight.to(torch.bfloat16).T, weight.T.half()):
        content, _ = packed(other, INT16)
        assert torch.equal(content, bytes_of(reference.packed(other.float(), INT16)[0]))


@pytest.mark.parametrize("half_bytes", [False, True])
@pytest.mark.parametrize("inputs", [32, 576])
def test_weights_of_four_bits_are_laid_out_as_drawn(inputs: int, half_bytes: bool) -> None:
    """Found again, or the nearest. Where a weight lies between two steps either may be taken."""
    byte_products()
    weight = of_half_bytes(130, inputs) if half_bytes else randn(130, inputs)
    content, scales = packed(weight, W4A16, half_bytes)
    expected, units = reference.packed(weight, W4A16, nearest=not half_bytes)
    assert scales is not None and units is not None
    wanted = units.contiguous().view(-1)
    assert (scales - wanted).abs().max() <= 2e-3 * wanted.abs().max()
    assert (scales == wanted).float().mean() > 0.95
    assert (content == bytes_of(expected)).float().mean() > 0.999


def test_what_is_taken_for_four_bits() -> None:
    """A file's weights, blocks that had not all sixteen numbers among them; zeros; not what has
    fewer inputs than a block, or more steps in any 16 outputs.
    """
    byte_products()

    def is_taken(weight: Tensor) -> bool:
        found = int(Owner(W8A8, half_bytes=True).linear(weight).format)
        assert found in (W8A8, W4A8)
        return found == W4A8

    weight = of_half_bytes(100, 96)
    assert is_taken(weight) and is_taken(weight.to(torch.bfloat16))
    few = weight.view(100, 3, 32).clone()
    few[::2] = few[::2, :, :5].repeat(1, 1, 7)[:, :, :32]
    assert is_taken(few.view(100, 96))
    assert is_taken(torch.zeros(3, 64))
    assert is_taken(torch.full((3, 64), 0.3))
    assert not is_taken(bf16_values(100, 96))
    assert not is_taken(weight[:, :48])
    for at in (0, 50, 99):
        damaged = weight.clone()
        damaged[at] += 0.3 * weight.norm() / 10 * randn(96)
        assert not is_taken(damaged)
    broken = weight.clone()
    broken[40, 40] = torch.nan
    assert not is_taken(broken)


@given(st.data())
def test_what_fits_into_twelve_bits(data: st.DataObject) -> None:
    """A sign, eight bits and a shift of at most 7; nothing with a ninth bit."""
    if not library.kernel().mr_int12_products():
        return
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
    assert Owner(INT16).linear(weight).format == INT16


def test_only_what_fits_is_packed_in_twelve_bits() -> None:
    if not library.kernel().mr_int12_products():
        pytest.skip("this variant has no weights of 12 bits")
    weight = bf16_values(130, 64)
    owner = Owner(INT16)
    assert owner.linear(weight).format == INT12
    assert owner.saved_bytes == 192 * 64 // 2
    finer = weight.clone()
    finer[9, 9] = 1 + 2.0**-12
    assert owner.linear(finer).format == INT16
    assert owner.linear(weight[:, :60]).format == INT16
    assert Owner(INT16, twelve_bits=False).linear(weight).format == INT16
    assert owner.saved_bytes == 192 * 64 // 2


@pytest.mark.parametrize(
    ("layout", "inputs"), [(INT16, 63), (BF16, 63), (W8A8, 66), (W4A8, 48), (W4A16, 63)]
)
def test_inputs_that_a_layout_does_not_take(layout: int, inputs: int) -> None:
    with pytest.raises(
        library.NativeUnavailable, match=rf"with {inputs} inputs, which is not a multiple of"
    ):
        Owner(layout).linear(bf16_values(70, inputs))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("layout", [BF16, INT16, INT8, W8A8, W8A16, W4A8, W4A16])
def test_a_broken_weight_stays_visible(layout: int, broken: float) -> None:
    if layout in (INT8, INT16) and not library.kernel().mr_integer_products():
        pytest.skip("this variant multiplies no integers")
    if layout in (W8A8, W8A16, W4A8, W4A16):
        byte_products()
    weight, x = bf16_values(70, 64), randn(3, 64, seed=1)
    weight[9, 5] = broken
    y = linear(weight, x, layout=layout)
    assert not torch.isfinite(y[:, 9]).any()
    assert torch.isfinite(y[:, :9]).all() and torch.isfinite(y[:, 10:]).all()


def test_bounds_of_a_screen() -> None:
    byte_products()
    weight = odd_weights(200, 96)
    weight[9, 9] = torch.nan
    owner = Owner()  # keeps them alive
    screen = owner.screen(weight, None)
    error, norm = (lies_at(part, 4 * 256, torch.float32) for part in (screen.error, screen.norm))
    assert error[9] == norm[9] == torch.inf
    weight[9] = 0
    for found, true in zip((error, norm), reference.screening_norms(weight), strict=True):
        found = found[:200].double()
        found[9] = 0
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
