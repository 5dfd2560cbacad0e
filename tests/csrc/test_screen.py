"""A head's likeliest token by its copy in 8 bits (csrc/screen.c) is the head's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multirate.runtime.native import abi, library
from multirate.runtime.native.formats import Q8_0, screened
from multirate.runtime.native.packing import Owner, padded
from multirate.runtime.noise import Noise

from .harness import bf16_values, pointer, randn


@pytest.fixture(autouse=True)
def heads_are_screened(arch: str) -> None:
    if not screened():
        pytest.skip(f"no heads are screened on {arch}")


def tokens_of(
    weight: Tensor,
    x: Tensor,
    screen: bool,
    noise: list[Noise] | None = None,
    bias: Tensor | None = None,
    threads: int = 2,
) -> tuple[list[int], Tensor]:
    """mr_argmax_pass without layers or norm → the tokens, and what it leaves of the logits."""
    (count, hidden), vocab = x.shape, len(weight)
    owner, workspace = Owner(), library.Workspace(threads)
    head = owner.linear(weight, bias)
    x = x.float().clone().contiguous()
    logits, tokens = torch.empty(count, head.outputs), np.empty(count, np.int64)
    columns = {name: abi.ints(np.zeros(count, np.int32)) for name in ("seq", "slot", "pos")}
    held = [np.zeros(count, np.int32), np.zeros(count, np.int64)]
    library.kernel().mr_argmax_pass(
        workspace.address,
        abi.new("Shape", hidden=hidden, vocab=vocab, eps=1e-5),
        abi.NULL,
        abi.NULL,
        abi.new("Rows", count=count, prefix=abi.ints(held[0]), tree=abi.longs(held[1]), **columns),
        abi.NULL,
        abi.NULL,
        pointer(x),
        0,
        0,
        head,
        owner.screen(weight, bias) if screen else abi.NULL,
        abi.NULL,
        abi.noise_of(noise) if noise else abi.NULL,
        pointer(logits),
        abi.longs(tokens),
    )
    return tokens.tolist(), logits[:, :vocab]


def check(
    weight: Tensor,
    x: Tensor,
    noise: list[Noise] | None = None,
    bias: Tensor | None = None,
    threads: int = 2,
) -> float:
    """The same tokens with the screen as without; no logit above its bound. Returns the share of
    logits that became exact.
    """
    tokens, logits = tokens_of(weight, x, False, noise, bias, threads)
    found, bounds = tokens_of(weight, x, True, noise, bias, threads)
    assert found == tokens
    assert (bounds >= logits).all()
    return float((bounds == logits).float().mean())


def noises(rows: int, temperature: float) -> list[Noise] | None:
    return [Noise(5, place, temperature) for place in range(rows)] if temperature else None


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 1500),
    blocks=st.integers(1, 20),
    rows=st.integers(1, 9),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    outliers=st.integers(0, 5),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
    threads=st.integers(1, 3),
)
def test_the_token_is_the_heads_own(
    seed: int,
    vocab: int,
    blocks: int,
    rows: int,
    temperature: float,
    outliers: int,
    spread: float,
    threads: int,
) -> None:
    """Rows and weights with outliers, and outputs of very different norms."""
    hidden = 32 * blocks
    weight, x = bf16_values(vocab, hidden, seed=seed), randn(rows, hidden, seed=seed + 1)
    weight *= torch.exp(spread * randn(vocab, 1, seed=seed + 2)).to(torch.bfloat16).float()
    weight[:, :outliers] *= 64
    x[:, hidden - outliers :] *= 300
    check(weight, x, noises(rows, temperature), threads=threads)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_few_logits_become_exact(temperature: float) -> None:
    """Where the likeliest tokens stand out, as a trained model's do."""
    weight, x = bf16_values(4096, 256), randn(7, 256, seed=1)
    share = check(weight, x, noises(7, temperature))
    assert 0 < share < 0.05


@pytest.mark.parametrize("sign", [1, -1])
def test_rows_along_the_copys_error_are_within_the_bounds(sign: int) -> None:
    """Where Cauchy-Schwarz has no room: the row is what an output's copy lacks, and its own copy is
    exact.
    """
    weight = bf16_values(200, 256)
    copied = Owner().quantised(weight, Q8_0).dequantise(torch.float32)
    lacking = weight - copied
    steps = lacking.view(200, -1, 32)
    unit = steps.abs().amax(dim=2, keepdim=True) / 127
    x = ((steps / unit).round() * unit).view(200, -1)[:60]
    check(weight, sign * x)
    _, bounds = tokens_of(weight, x, True)
    _, logits = tokens_of(weight, x, False)
    copies = x @ copied.T
    gap = (logits - copies).diagonal() / (bounds - copies).diagonal()
    assert gap.median() > 0.8  # the bounds are no wider than they have to be


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_of_equal_outputs_the_lowest_id_is_taken(temperature: float) -> None:
    weight, x = bf16_values(700, 64), randn(5, 64, seed=1)
    for row, (first, second) in enumerate([(3, 4), (10, 690), (530, 531), (0, 699), (15, 16)]):
        weight[first] = weight[second] = (x[row] * 3).to(torch.bfloat16).float()
    check(weight, x, noises(5, temperature))


@pytest.mark.parametrize("temperature", [0.0, 1e-3])
@pytest.mark.parametrize("vocab", [60, 2000])
def test_where_all_outputs_are_nearly_equal_the_whole_head_is_read(
    vocab: int, temperature: float
) -> None:
    """More columns, and more candidates, than are settled one by one."""
    weight = bf16_values(1, 128).repeat(vocab, 1)
    weight += bf16_values(vocab, 128, seed=2, scale=1e-3)
    share = check(weight, randn(3, 128, seed=3), noises(3, temperature))
    assert share > (0.3 if vocab == 2000 else 0)


@pytest.mark.parametrize("rows", [60, 61, 130])
def test_more_rows_than_a_pass_has(rows: int) -> None:
    check(bf16_values(333, 96), randn(rows, 96, seed=1), noises(rows, 0.8))
    check(bf16_values(333, 96), randn(rows, 96, seed=1))


def test_a_bias_is_part_of_the_bounds() -> None:
    bias = randn(500, seed=4) * 50
    check(bf16_values(500, 64), randn(6, 64, seed=1), bias=bias)
    check(bf16_values(500, 64), randn(6, 64, seed=1), noises(6, 1.0), bias=bias)


def test_outputs_behind_the_vocabulary_do_not_count() -> None:
    """Padding says 0, which is more than any other output does."""
    x = randn(4, 64, seed=1)
    weight = -x.sum(0).repeat(1030, 1).to(torch.bfloat16).float() - x.mean(0)
    weight = (weight + bf16_values(1030, 64, scale=0.05)).to(torch.bfloat16).float()
    assert padded(1030) > 1030
    check(weight, x)


def test_zeros_and_what_is_not_finite() -> None:
    """As the head itself has it: the last id of a row of no numbers, −1 where it is drawn."""
    weight, x = bf16_values(130, 64), randn(6, 64, seed=1)
    x[0] = 0.0
    x[1, 3] = torch.nan
    x[2, 5] = torch.inf
    x[3] *= 1e-35
    x[4] *= 1e18
    for noise in (None, noises(6, 1.0)):
        tokens, _ = tokens_of(weight, x, False, noise)
        found, _ = tokens_of(weight, x, True, noise)
        assert found == tokens


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("vocab", [9, 130, 2000])
@pytest.mark.parametrize("k", [1, 5, 60])
def test_the_likeliest_tokens_are_the_heads_own(k: int, vocab: int, spread: float) -> None:
    """Of random outputs, of nearly equal ones, and of outputs that there are twice; two of the rows
    are no numbers, and zeros.
    """
    weight, x = bf16_values(vocab, 128), randn(7, 128, seed=1)
    if spread:
        weight = bf16_values(1, 128).repeat(vocab, 1) + spread * weight
    weight[vocab // 2 :: 3] = weight[: len(weight[vocab // 2 :: 3])]
    x[2], x[3, 1] = 0.0, torch.nan
    rows = len(x)
    shape = abi.new("Shape", hidden=128, vocab=vocab, eps=1e-5)
    branch = abi.new("Branch", shape=shape)
    found = []
    for screen in (False, True):
        owner, workspace = Owner(), library.Workspace(2)
        head = owner.linear(weight)
        bounds = owner.screen(weight, None) if screen else None
        hidden, best = x.clone(), np.zeros((rows, k), np.int64)
        scratch, (ids, tokens) = torch.empty(rows, head.outputs), np.zeros((2, rows), np.int64)
        parents, path = np.zeros((2, rows), np.int32)
        step = abi.new(
            "SpeculativeStep",
            branch=branch,
            head=head,
            screen=bounds,
            ids=abi.longs(ids),
            tokens=abi.longs(tokens),
            parents=abi.ints(parents),
            hidden=hidden.data_ptr(),
            scratch=scratch.data_ptr(),
            capacity=64,
        )
        emitted = library.kernel().mr_verify_draft(
            workspace.address, step, rows - 1, 1, k, abi.longs(best), abi.ints(path)
        )
        found.append((best.tolist(), ids[:emitted].tolist(), path[:emitted].tolist()))
    assert found[0] == found[1]
