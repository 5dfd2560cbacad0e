"""Sampling's random numbers and the argmax with them (csrc/noise.c): the bits that numpy gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multirate.runtime.native import abi, library
from multirate.runtime.noise import KNOTS, Noise, with_noise

from .harness import pointer, randn

SCALES = [1.0, 0.7, 1.3, 0.013, 37.5, 1e-30, 1e30]


def in_the_kernel(noise: Noise, count: int, tokens: np.ndarray | None = None) -> np.ndarray:
    made = np.empty(count, np.float32)
    ids = abi.NULL if tokens is None else abi.longs(tokens)
    library.kernel().mr_noise(abi.noise_of([noise]), ids, count, abi.floats(made))
    return made


def chosen(logits: torch.Tensor, vocab: int, noise: list[Noise]) -> list[int]:
    tokens = np.empty(len(logits), np.int64)
    library.kernel().mr_noisy_argmax(
        pointer(logits), len(logits), vocab, logits.shape[1], abi.noise_of(noise), abi.longs(tokens)
    )
    return tokens.tolist()


def test_tables_are_as_long_as_the_kernel_believes() -> None:
    assert abi.constant("NOISE_KNOTS") == KNOTS


@pytest.mark.parametrize("scale", SCALES)
def test_numbers_are_numpys_bit_for_bit(scale: float) -> None:
    for key, place in ((0, 0), (2**64 - 1, 5), (0x123456789ABCDEF0, 2**40)):
        noise = Noise(key, place, scale)
        for count in (1, 15, 64, 50_001):
            assert np.array_equal(in_the_kernel(noise, count), noise.values(count))
        tokens = np.array([7, 3, 49_151, 0, 2**31 - 1])
        assert np.array_equal(
            in_the_kernel(noise, 5, tokens), noise.of_tokens(tokens.astype(np.uint32))
        )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    vocab=st.integers(1, 700),
    scale=st.sampled_from(SCALES),
    spread=st.sampled_from([0.0, 0.5, 4.0, 1000.0]),
    rounded=st.booleans(),
)
def test_the_argmax_is_that_of_all_sums(
    seed: int, vocab: int, scale: float, spread: float, rounded: bool
) -> None:
    """Ties and forbidden tokens included: the bound passes over none that wins."""
    logits = torch.full((4, -(-vocab // 64) * 64), 1e9)  # behind the vocabulary: must not count
    logits[:, :vocab] = randn(4, vocab, seed=seed) * spread
    if rounded:
        logits[:, :vocab] = logits[:, :vocab].round()
        logits[1:, :vocab][randn(3, vocab, seed=seed + 1) > 0] = -math.inf
        logits[:, vocab // 2] = 0.0
    noise = [Noise(seed, place, scale) for place in range(4)]
    expected = with_noise(logits[:, :vocab], noise).numpy().argmax(-1)
    assert chosen(logits, vocab, noise) == expected.tolist()


def test_of_a_real_vocabulary_too() -> None:
    logits = randn(8, 49_152, seed=1) * 3
    noise = [Noise(3, place, 1.0) for place in range(8)]
    assert chosen(logits, 49_152, noise) == with_noise(logits, noise).numpy().argmax(-1).tolist()


def test_equal_sums_are_the_lowest_ids() -> None:
    """Noise that is lost in the logits' rounding."""
    logits = torch.full((1, 128), 1e10)
    assert chosen(logits, 128, [Noise(1, 1, 1.0)]) == [0]
    logits[0, :40] = 0.0
    assert chosen(logits, 128, [Noise(1, 1, 1.0)]) == [40]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_give_no_token(bad: float) -> None:
    logits = randn(3, 128, seed=2)
    logits[1, 100] = bad
    logits[2] = -math.inf
    noise = [Noise(5, place, 1.0) for place in range(3)]
    tokens = chosen(logits, 128, noise)
    assert tokens[0] >= 0 and tokens[1:] == [-1, -1]
