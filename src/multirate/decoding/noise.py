"""The random numbers of one sequence, a Gumbel number for each position and token.

A token is drawn by adding them to the logits: argmax(logits / T + G) has the distribution
softmax(logits / T) when G is Gumbel noise [Gumbel 1954]. The noise belongs to the position, not to
the order in which positions are asked for. So everyone who adds it, the target model or what drafts
for it, draws the same token wherever their distributions are alike, at the rate that the overlap of
these allows without knowing each other's [Daliri, Musco, Suresh 2024, drafter-invariant speculative
decoding], and the text of a seed is the same whoever drafts.
"""

from __future__ import annotations

import numpy as np

_STEP = np.float32(2.0**-32)
_MOST = np.float32(1 - 2.0**-24)  # the largest float32 below 1


class GumbelNoise:
    """`at(position)`: independent Gumbel numbers times `scale`, one per token, of the stream
    (seed, number). Those of a few positions are kept.
    """

    def __init__(self, seed: int, number: int, scale: float = 1.0) -> None:
        self._seed, self._number, self._scale = seed, number, np.float32(scale)
        self._kept: dict[int, np.ndarray] = {}

    def at(self, position: int, vocab: int, begin: int = 0) -> np.ndarray:
        """float32 [vocab] of a position; not to be written to. begin: no earlier position will be
        asked for again.
        """
        found = self._kept.get(position)
        if found is None or len(found) != vocab:
            self._kept = {p: noise for p, noise in self._kept.items() if p >= begin}
            found = self._kept[position] = self._scale * gumbel(
                self._seed, (self._number, position), vocab
            )
        return found


def gumbel(seed: int, key: tuple[int, ...], count: int) -> np.ndarray:
    """The first `count` standard Gumbel numbers, float32, of the random stream of seed and key.

    −ln(−ln(1 − v)) of v uniform on 32 bits: exact to 2^-32 where it matters, in the upper tail,
    which is where an unlikely token is drawn.
    """
    generator = np.random.SFC64(np.random.SeedSequence(seed, spawn_key=key))
    bits = generator.random_raw((count + 1) // 2).view(np.uint32)[:count]
    v = bits.astype(np.float32)
    v += np.float32(0.5)
    v *= -_STEP
    np.maximum(v, -_MOST, out=v)
    np.log1p(v, out=v)
    np.negative(v, out=v)
    np.log(v, out=v)
    return np.negative(v, out=v)
