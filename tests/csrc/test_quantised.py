"""Quantised weights: blocks of GGUF files, packed and multiplied on every instruction set."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multirate.errors import UserError
from multirate.runtime.native import abi, formats, library
from multirate.runtime.native.formats import QUANTISABLE, QUANTISED, WeightFormat
from multirate.runtime.native.packing import Owner
from multirate.runtime.quantised import BLOCKS, QuantisedWeight, Weight

from .harness import pointer, randn

ALL = pytest.mark.parametrize("kind", QUANTISED, ids=lambda one: one.name)


def random_blocks(
    kind: WeightFormat, outputs: int, inputs: int, seed: int = 0, byte: int | None = None
) -> QuantisedWeight:
    """Blocks of any bits, or of one repeated byte, whose scales are finite and of one size."""
    rng = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind.name]]
    made = rng.integers(0, 256, (outputs, inputs // block, size), np.uint8)
    if byte is not None:
        made[:] = byte
    halves = [0] if kind.name in ("Q8_0", "Q4_0", "Q5_0") else [0, 2]
    for at in [208] if kind.name == "Q6_K" else halves:
        scales = (rng.standard_normal((outputs, inputs // block)) / 50).astype(np.float16)
        made[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return QuantisedWeight(
        "w", GGMLQuantizationType[kind.name], (outputs, inputs), made.reshape(outputs, -1)
    )


def dequantised(blocks: QuantisedWeight) -> Tensor:
    """What the package gguf makes of them, fp32 [outputs, inputs]."""
    values = gguf.dequantize(blocks.blocks(), blocks.kind)
    return torch.from_numpy(values.reshape(blocks.shape))


def rounded(x: Tensor) -> Tensor:
    """Rows as the products take them: 8 bits in blocks of 32, in float64."""
    blocks = x.unflatten(1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = largest / 127
    q = torch.where(largest > 0, (blocks * (127 / largest)).round(), torch.zeros(()))
    return (q.double() * scale.double()).flatten(1)


def product(packed: abi.CData, x: Tensor, threads: int = 1) -> Tensor:
    y = torch.empty(len(x), packed.outputs)
    workspace = library.Workspace(threads)
    library.kernel().mr_linear(
        workspace.address, packed, pointer(x.contiguous()), abi.NULL, 0.0, len(x), pointer(y), 0
    )
    return y


@ALL
def test_packed_weights_are_those_of_the_file(kind: WeightFormat) -> None:
    blocks = random_blocks(kind, 100, 512)
    owner = Owner()
    packed, expected = owner.linear(blocks), dequantised(blocks)
    for output in range(100):
        found = torch.empty(512)
        library.kernel().mr_decode_output(packed, output, pointer(found))
        assert torch.equal(found, expected[output])


@ALL
def test_products_are_those_of_the_rounded_rows(kind: WeightFormat) -> None:
    blocks, x = random_blocks(kind, 64, 512), randn(9, 512)
    owner = Owner()
    expected = rounded(x) @ dequantised(blocks).double().T
    scale = rounded(x).abs() @ dequantised(blocks).double().abs().T
    found = product(owner.linear(blocks), x).double()
    assert ((found - expected).abs() <= 2e-6 * scale).all()


@ALL
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_the_largest_products_fit_the_sums(kind: WeightFormat, byte: int) -> None:
    """The largest and least weights times rows of 127 and -127: nothing saturates or wraps."""
    blocks, x = random_blocks(kind, 64, 256, byte=byte), torch.ones(8, 256)
    x[4:] = -1
    owner = Owner()
    weights = dequantised(blocks).double()
    found, expected = product(owner.linear(blocks), x).double(), rounded(x) @ weights.T
    assert ((found - expected).abs() <= 2e-6 * weights.abs().sum(1)).all()


@ALL
def test_a_row_does_not_depend_on_the_others(kind: WeightFormat) -> None:
    owner = Owner()
    packed, x = owner.linear(random_blocks(kind, 130, 512)), randn(60, 512)
    together = product(packed, x, threads=2)
    for n in (0, 13, 59):
        assert torch.equal(product(packed, x[n : n + 1])[0], together[n])


@ALL
def test_rows_of_zeros_and_of_what_is_no_number(kind: WeightFormat) -> None:
    owner = Owner()
    packed, x = owner.linear(random_blocks(kind, 64, 256)), randn(4, 256)
    x[0] = 0
    x[1, 40], x[2, 200] = torch.inf, torch.nan
    found = product(packed, x)
    assert (found[0] == 0).all()
    assert found[1:3].isnan().all()
    assert found[3].isfinite().all()


def mixed(seed: int) -> list[Weight]:
    """Queries, keys and values of three formats, one of them floats."""
    return [
        random_blocks(formats.Q4_K, 128, 256, seed),
        random_blocks(formats.Q6_K, 32, 256, seed + 1),
        randn(32, 256, seed=seed + 2).to(torch.bfloat16),
    ]


@pytest.mark.parametrize("rows", [1, 7, 31])
def test_a_layer_of_several_formats_is_its_parts(rows: int) -> None:
    parts, x, owner = mixed(rows), randn(rows, 256), Owner()
    found = product(owner.linear(parts), x, threads=2)
    queries, keys, values = (product(owner.linear(one), x)[:, : one.shape[0]] for one in parts)
    assert torch.equal(found[:, :160], torch.cat([queries, keys], 1))
    # sums of floats may be fused here and not where the layer has one format alone
    torch.testing.assert_close(found[:, 160:192], values, rtol=1e-5, atol=1e-5)


def test_gates_and_ups_of_two_formats_take_turns() -> None:
    gate, up = random_blocks(formats.Q5_K, 96, 256), random_blocks(formats.Q8_0, 96, 256)
    owner, x = Owner(), randn(5, 256)
    found = product(owner.gate_up(gate, up), x).unflatten(1, (-1, 2, 32))
    for i, one in enumerate((gate, up)):
        alone = product(owner.linear(one), x)[:, :96]
        assert torch.equal(found[:, :, i].flatten(1), alone)


@pytest.mark.parametrize("kind", QUANTISABLE, ids=lambda one: one.name)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-6, 1e-3, 1.0, 300.0]),
    dull=st.booleans(),
)
def test_floats_become_the_blocks_that_gguf_makes(
    kind: WeightFormat, seed: int, scale: float, dull: bool
) -> None:
    weight = randn(7, 96, seed=seed) * scale
    if dull:  # equal weights, zeros, ties
        weight = (weight / scale).round() * scale
        weight[0] = 0
    found = Owner().quantised(weight, kind).blocks()
    expected = gguf.quants.quantize(weight.numpy(), GGMLQuantizationType[kind.name])
    assert np.array_equal(found, expected)


@ALL
def test_a_scale_that_is_not_finite_is_refused(kind: WeightFormat) -> None:
    blocks = random_blocks(kind, 70, 512)
    at = 208 if kind.name == "Q6_K" else 0
    for bad in (np.inf, np.nan):
        blocks.blocks()[66, at : at + 2] = np.array([bad], np.float16).view(np.uint8)
        with pytest.raises(UserError, match="a scale of its row 66 is not finite"):
            Owner().linear(blocks)


def test_embeddings_of_a_packed_table() -> None:
    blocks = random_blocks(formats.Q6_K, 100, 256)
    owner = Owner()
    table, ids = owner.table(blocks), torch.tensor([3, 99, 0, -1, 100])
    found = torch.empty(5, 256)
    library.kernel().mr_embed(table, abi.tensor(ids), 5, 256, 2.0, pointer(found))
    assert torch.equal(found[:3], dequantised(blocks)[ids[:3]] * 2)
    assert (found[3:] == 0).all()  # no tokens


def test_the_loader_and_the_kernel_list_the_same_formats() -> None:
    assert tuple(one.name for one in QUANTISED) == BLOCKS
