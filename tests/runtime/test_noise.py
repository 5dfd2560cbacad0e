"""Sampling's random numbers: Gumbel numbers to the tails, independent of each other, and functions
of seed, sequence, place and token alone.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from multirate.errors import UserError
from multirate.runtime.noise import Noise, NoiseStream, noisy_argmax, random_bits, values_on

ALARM = 1e-6


def bits_of(keys: list[int], places: list[int], count: int) -> np.ndarray:
    """uint32 [keys · places, count]."""
    tokens = np.arange(count, dtype=np.uint32)
    return np.stack([random_bits(key, place, tokens) for key in keys for place in places])


def test_bits_are_uniform() -> None:
    """χ² of bytes over tokens, places and keys, and every bit by itself."""
    bits = bits_of([0, 1, 2, 2**63], list(range(16)), 49_152)
    for byte in range(4):
        for axis_first in (bits, bits.T):
            part = (axis_first.reshape(-1)[: 2**21] >> np.uint32(8 * byte)) & np.uint32(255)
            assert stats.chisquare(np.bincount(part, minlength=256)).pvalue > ALARM
    for bit in range(32):
        ones = int(((bits >> np.uint32(bit)) & np.uint32(1)).sum())
        assert abs(ones - bits.size / 2) < 5.5 * math.sqrt(bits.size) / 2


@pytest.mark.parametrize("along", ["tokens", "places", "keys"])
def test_neighbours_have_nothing_in_common(along: str) -> None:
    """Half of the bits differ, each independently; pairs of high and of low nibbles are uniform."""
    count = 4096
    if along == "tokens":
        bits = bits_of([7], list(range(64)), count + 1)
        first, second = bits[:, :-1].ravel(), bits[:, 1:].ravel()
    elif along == "places":
        bits = bits_of([7], list(range(65)), count)
        first, second = bits[:-1].ravel(), bits[1:].ravel()
    else:
        bits = bits_of(list(range(65)), [7], count)
        first, second = bits[:-1].ravel(), bits[1:].ravel()
    for shift in (0, 4, 12, 28):
        nibbles = [(x >> np.uint32(shift)) & np.uint32(15) for x in (first, second)]
        pairs = np.bincount(nibbles[0] * 16 + nibbles[1], minlength=256)
        assert stats.chisquare(pairs).pvalue > ALARM
    for bit in range(32):
        differ = int((((first ^ second) >> np.uint32(bit)) & np.uint32(1)).sum())
        assert abs(differ - first.size / 2) < 5.5 * math.sqrt(first.size) / 2


def test_numbers_are_gumbel_distributed_to_the_tails() -> None:
    numbers = np.concatenate([Noise(5, place, 1.0).values(50_000) for place in range(20)])
    assert numbers.dtype == np.float32 and np.isfinite(numbers).all()
    assert stats.kstest(numbers, "gumbel_r").pvalue > ALARM
    for high in (8.0, 11.0):  # the share above: where an unlikely token is drawn
        expected = len(numbers) * -np.expm1(-np.exp(-high))
        assert abs((numbers > high).sum() - expected) < 5 * expected**0.5 + 1
    for low in (-2.0, -2.3):
        expected = len(numbers) * np.exp(-np.exp(-low))
        assert abs((numbers < low).sum() - expected) < 5 * expected**0.5 + 1


@pytest.mark.parametrize("scale", [1.0, 0.7, 1.9, 1e-3])
def test_numbers_are_the_formula_s(scale: float) -> None:
    tokens = np.arange(100_000, dtype=np.uint32)
    bits = random_bits(9, 4, tokens).astype(np.int64)
    large = bits >= 2**31
    distance = (np.where(large, 2**32 - 1 - bits, bits) | 1) / 2**32
    exact = -np.log(np.where(large, -np.log(distance), -np.log1p(-distance)))
    assert np.abs(Noise(9, 4, scale).values(100_000) / scale - exact).max() < 1.2e-5


def test_numbers_belong_to_seed_sequence_and_place() -> None:
    stream = NoiseStream(7, 1)
    first, later = stream.at(5).values(11).copy(), stream.at(9).values(11).copy()
    assert np.array_equal(stream.at(5).values(11), first)
    assert np.array_equal(stream.at(9, begin=8).values(11), later)
    assert np.array_equal(NoiseStream(7, 1).at(9).values(11), later)  # in any order
    assert np.array_equal(NoiseStream(7, 1).at(5).values(64)[:11], first)  # of any vocabulary
    some = np.array([10, 0, 3], np.uint32)
    assert np.array_equal(stream.at(5).of_tokens(some), first[some])
    assert np.allclose(NoiseStream(7, 1, 0.5).at(5).values(11), first / 2, atol=1e-5)
    others = [NoiseStream(7, 1).at(6), NoiseStream(7, 0).at(5), NoiseStream(8, 1).at(5)]
    for other in others:
        assert abs(np.corrcoef(stream.at(5).values(5000), other.values(5000))[0, 1]) < 0.08


def test_texts_of_a_seed_stay_what_they_are() -> None:
    """Another hash, table or order of operations would be another text for every seed."""
    noise = NoiseStream(1, 0).at(10)
    assert [round(float(x), 4) for x in noise.values(4)] == [2.0282, 0.5051, -0.7568, 1.1826]
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    assert noisy_argmax(logits, [NoiseStream(1, b).at(10 + b) for b in range(3)]) == [6, 93, 259]


def test_temperatures_beyond_all_bounds() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert noisy_argmax(logits, [NoiseStream(0, 0, 1e-300).at(3)]) == [1]
    hot = [noisy_argmax(logits, [NoiseStream(0, 0, 1e300).at(place)])[0] for place in range(60)]
    assert set(hot) == {0, 1, 2}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(UserError, match="not finite"):
        noisy_argmax(torch.tensor([[0.0, bad, 1.0]]), [NoiseStream(0, 0).at(3)])


@pytest.mark.parametrize("scale", [1.0, 0.7, 37.5, 1e-30, 1e30])
def test_numbers_made_by_torch_are_the_same_bits(scale: float) -> None:
    places = [(0, 0), (2**64 - 1, 5), (0x123456789ABCDEF0, 2**40)]
    noise = [Noise(key, place, scale) for key, place in places]
    made = values_on(torch.device("cpu"), noise, 300_000)
    assert np.array_equal(made.numpy(), np.stack([one.values(300_000) for one in noise]))
