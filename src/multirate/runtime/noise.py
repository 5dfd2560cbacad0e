"""The random numbers that sampling adds to logits: one for each seed, sequence, place in it and
token, a pure function of these.

A token is drawn by adding them to the logits: argmax(logits / T + G) has the distribution
softmax(logits / T) when G is Gumbel noise [Gumbel 1954]. The noise belongs to the place, not to
the order in which places are asked for. So everyone who adds it, the target model or what drafts
for it, draws the same token wherever their distributions are alike, at the rate that the overlap of
these allows without knowing each other's [Daliri, Musco, Suresh 2024, drafter-invariant speculative
decoding], and the text of a seed is the same whoever drafts.

It is also the same on every backend and processor: here it is numpy, in the kernel csrc/noise.c,
and both give the same bits (tests/csrc/test_noise.py), since nothing in it can be rounded in two
ways. In order:

1. a 64-bit key of the sequence (SeedSequence of seed and number), with the place through splitmix64
   [Steele, Lea, Flood 2014] two 32-bit words;
2. the token, with one word added before and the other one xored in after the first of its three
   rounds, through the hash triple32 [Wellons 2018]: 32 bits of a uniform number v;
3. T · G of v, −T · ln(−ln(1 − v)), linear between knots: 128 in each octave of the distance of v to
   the nearer end of [0, 1]. Knots are integers, multiples of a power of two, `unit`, and the
   interpolation is in integers of 32 bits; it is off by T · 1e-5 at most;
4. the integer, below 2^24, times `unit` is a float32 exactly, so that logit + noise is rounded
   once, by a fused multiplication and addition as by separate ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from multirate.errors import UserError

STEPS, OCTAVES = 128, 31  # knots of an octave, octaves of a half of [0, 1]
KNOTS = OCTAVES * STEPS + 2  # of a half: its end, and one behind it
NOT_FINITE = (
    "the model's logits are not finite numbers; use a model that works in the chosen dtype, or "
    "another dtype"
)
_BITS_64, _BITS_32 = 2**64 - 1, 2**32 - 1
_FRACTION_BITS = 16  # of a float32's mantissa after the 7 that number an octave's knots
_FIRST_KNOT = 127 * STEPS  # the bits of 1.0 without those
_MOST_SCALE = 2.0**100


@functools.lru_cache(maxsize=8)
def gumbel_table(scale: float) -> tuple[np.ndarray, float]:
    """scale times the Gumbel numbers of v: those of v up to ½, then those of 1 − v up to ½, by
    knots. → int32 [2, KNOTS], and the unit that they count in, a power of two.
    """
    octave, step = np.arange(OCTAVES)[:, None], np.arange(STEPS)
    ends = [2.0**OCTAVES] * 2
    v = np.append(((1 + step / STEPS) * 2.0**octave).ravel(), ends) / 2**32
    numbers = -scale * np.log(np.stack([-np.log1p(-v), -np.log(v)]))
    exponent = math.frexp(scale)[1] - 19  # the largest number, 22.2 · scale, is below 2^24 units
    table = np.rint(np.ldexp(numbers, -exponent)).astype(np.int32)
    table.setflags(write=False)
    return table, 2.0**exponent


def place_words(key: int, place: int) -> tuple[int, int]:
    """The two 32-bit words that a place's numbers are made of: splitmix64 of key and place."""
    z = (key + (place + 1) * 0x9E3779B97F4A7C15) & _BITS_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _BITS_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _BITS_64
    z ^= z >> 31
    return z & _BITS_32, z >> 32


def random_bits(key: int, place: int, tokens: np.ndarray) -> np.ndarray:
    """32 random bits of each token: uint32 [n] of uint32 [n]."""
    first, second = place_words(key, place)
    x = tokens + np.uint32(first)
    spare = x >> np.uint32(17)
    x ^= spare
    x *= np.uint32(0xED5AD4BB)
    x ^= np.right_shift(x, np.uint32(11), out=spare)
    x ^= np.uint32(second)
    x *= np.uint32(0xAC4C1B51)
    x ^= np.right_shift(x, np.uint32(15), out=spare)
    x *= np.uint32(0x31848BAB)
    x ^= np.right_shift(x, np.uint32(14), out=spare)
    return x


class Noise:
    """What is added to the logits of one place of a sequence before their argmax is taken: the
    temperature `scale` times Gumbel numbers. A scale beyond 2^±100 counts as that.

    key: of the sequence. place: the number of the token that is chosen, counted from the prompt's
    first. table, unit: `gumbel_table`'s.
    """

    def __init__(self, key: int, place: int, scale: float) -> None:
        self.key, self.place = key, place
        self.scale = min(max(scale, 1 / _MOST_SCALE), _MOST_SCALE)
        self.table, self.unit = gumbel_table(self.scale)
        self._values = np.empty(0, np.float32)

    def values(self, vocab: int) -> np.ndarray:
        """float32 [vocab] of the first tokens; kept, and not to be written to."""
        if len(self._values) < vocab:
            self._values = self.of_tokens(np.arange(vocab, dtype=np.uint32))
        return self._values[:vocab]

    def of_tokens(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [n] of these tokens, uint32 [n]."""
        bits = random_bits(self.key, self.place, tokens).view(np.int32)
        half = bits >> 31  # −1: v is the larger half, and its distance to 1 is read
        bits ^= half
        bits |= 1
        distance = bits.astype(np.float32).view(np.int32)  # its bits: octave, knot, fraction
        knot = distance >> _FRACTION_BITS
        knot -= _FIRST_KNOT
        knot += half & KNOTS
        distance &= (1 << _FRACTION_BITS) - 1
        table, index = self.table.reshape(-1), knot.astype(np.intp)
        numbers = table.take(index, mode="clip")  # none is outside: numpy need not look first
        step = table[1:].take(index, mode="clip")
        step -= numbers
        step *= distance
        step >>= _FRACTION_BITS
        numbers += step
        noise = numbers.astype(np.float32)
        noise *= np.float32(self.unit)
        return noise


class NoNoise(Noise):
    """Adds nothing: a greedy sequence's, in a batch with others that sample."""

    def __init__(self) -> None:
        self.key, self.place, self.scale, self.unit = 0, 0, 0.0, 0.0
        self.table = np.zeros((2, KNOTS), np.int32)
        self._values = np.empty(0, np.float32)


NO_NOISE = NoNoise()


class NoiseStream:
    """The noise of one sequence, the generation's `number`-th: `at(place)`, some of it kept."""

    def __init__(self, seed: int, number: int, scale: float = 1.0) -> None:
        words = np.random.SeedSequence(seed, spawn_key=(number,)).generate_state(1, np.uint64)
        self._key, self._scale = int(words[0]), scale
        self._kept: dict[int, Noise] = {}

    def at(self, place: int, begin: int = 0) -> Noise:
        """The noise of a place. begin: no earlier place will be asked for again."""
        found = self._kept.get(place)
        if found is None:
            self._kept = {p: noise for p, noise in self._kept.items() if p >= begin}
            found = self._kept[place] = Noise(self._key, place, self._scale)
        return found


def values_on(device: torch.device, noise: Sequence[Noise], vocab: int) -> Tensor:
    """`Noise.values` of n places at once, the same bits, made on a device of torch: float32 [n,
    vocab]. (64-bit integers, whose products keep their lowest 32 bits.)
    """
    if any(one.table is not noise[0].table for one in noise):  # of several scales
        return torch.cat([values_on(device, [one], vocab) for one in noise])
    words = [place_words(one.key, one.place) for one in noise]
    first, second = torch.tensor(words, dtype=torch.int64, device="cpu").to(device).unbind(1)
    x = (torch.arange(vocab, device=device) + first[:, None]) & _BITS_32
    x ^= x >> 17
    x = (x * 0xED5AD4BB) & _BITS_32
    x ^= x >> 11
    x ^= second[:, None]
    x = (x * 0xAC4C1B51) & _BITS_32
    x ^= x >> 15
    x = (x * 0x31848BAB) & _BITS_32
    x ^= x >> 14
    upper = x > _BITS_32 >> 1
    distance = (torch.where(upper, x ^ _BITS_32, x) | 1).float().view(torch.int32)
    knot = (distance >> _FRACTION_BITS) - _FIRST_KNOT
    knot += upper * KNOTS
    distance &= (1 << _FRACTION_BITS) - 1
    table = torch.from_numpy(noise[0].table.reshape(-1).copy()).to(device)
    numbers = table[knot]
    step = (table[knot + 1] - numbers) * distance
    numbers += step >> _FRACTION_BITS
    return numbers.float() * noise[0].unit


def with_noise(logits: Tensor, noise: Sequence[Noise]) -> Tensor:
    """logits [n, V], float32, and noise[i] added to row i → float32 [n, V]."""
    vocab = logits.shape[-1]
    if logits.device.type != "cpu":
        return logits + values_on(logits.device, noise, vocab)
    added = [one.values(vocab) for one in noise]
    # torch's threads stay out of the native kernel's way
    rows, out = logits.numpy(), np.empty(logits.shape, np.float32)
    for row, values, to in zip(rows, added, out, strict=True):
        np.add(row, values, out=to)
    return torch.from_numpy(out)


def noisy_argmax(logits: Tensor, noise: Sequence[Noise]) -> list[int]:
    """The argmax of each row of logits [n, V], float32, with noise[i] added to row i (ties: the
    lowest id). Raises UserError where the largest is not a finite number (a model whose logits
    overflowed).
    """
    scores = with_noise(logits, noise)
    # numpy for the same reason
    tokens = scores.numpy().argmax(-1) if scores.device.type == "cpu" else scores.argmax(-1)
    chosen: list[int] = tokens.tolist()
    best = scores[torch.arange(len(chosen), device="cpu"), chosen].tolist()
    if not all(map(math.isfinite, best)):
        raise UserError(NOT_FINITE)
    return chosen
