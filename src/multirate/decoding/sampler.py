"""The random state of one generation: settings, the tokens so far, one random stream per
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from multirate.decoding.logits import SamplingSettings, distribution, draw, greedy_tokens


class Sampler:
    """Chooses tokens for rows of logits, for draft and target alike.

    tokens[b]: prompt and emitted tokens of sequence b, the last emitted token included.
    Every sequence draws from its own stream, so its output does not depend on who else is in the
    batch.
    """

    def __init__(self, settings: SamplingSettings, prompts: Sequence[Sequence[int]]) -> None:
        self.settings = settings
        self.greedy = settings.greedy
        self.plain = settings.greedy and not settings.uses_context  # the bare argmax
        self.tokens = [list(prompt) for prompt in prompts]
        if not self.greedy:
            self._seed = (
                settings.seed if settings.seed is not None else int(torch.randint(2**62, ()).item())
            )
            self.generators = [self._stream(b) for b in range(len(prompts))]

    def _stream(self, number: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, number))

    def restart(self, seq: int, prompt: Sequence[int], number: int) -> None:
        """Another prompt takes the place of sequence `seq`; it draws from the `number`-th
        stream.
        """
        self.tokens[seq] = list(prompt)
        if not self.greedy:
            self.generators[seq] = self._stream(number)

    def contexts(
        self, seqs: Sequence[int], paths: Sequence[Sequence[int]] | None
    ) -> list[list[int]] | None:
        """The tokens before each row: those of its sequence, then the drafted `paths` tokens; None
        if not needed.
        """
        if not self.settings.uses_context:
            return None
        if paths is None:
            return [self.tokens[b] for b in seqs]
        return [[*self.tokens[b], *path] for b, path in zip(seqs, paths, strict=True)]

    def distribution(
        self, logits: Tensor, seqs: Sequence[int], paths: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """logits [n, V] of rows of the sequences `seqs` → probabilities [n, V].

        paths[i]: drafted tokens between the sequence's last emitted token (exclusive) and row i
        (inclusive).
        """
        return distribution(logits, self.settings, self.contexts(seqs, paths))

    def uniforms(self, seqs: Sequence[int]) -> list[float]:
        """One uniform number in [0, 1) from the stream of each listed sequence."""
        return [self.generators[b].random() for b in seqs]

    def draw(self, probs: Tensor, seqs: Sequence[int]) -> list[int]:
        """One token from each row of probs [n, V]."""
        return draw(probs, self.uniforms(seqs))

    def choose(
        self, logits: Tensor, seqs: Sequence[int], paths: Sequence[Sequence[int]] | None = None
    ) -> list[int]:
        """The next token of each row of logits [n, V]: argmax when greedy, drawn otherwise."""
        if self.greedy:
            return greedy_tokens(logits, self.settings, self.contexts(seqs, paths))
        return self.draw(self.distribution(logits, seqs, paths), seqs)
