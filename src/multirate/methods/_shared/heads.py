"""What drafters share whose heads read the final residual of the last verified row (Medusa,
Hydra).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.drafter import Drafter
from multirate.methods._shared.captured_runner import CapturedRunner
from multirate.methods._shared.reduced_head import limited_to
from multirate.runtime.decoder import Decoder
from multirate.runtime.noise import Noise, with_noise


class HeadsDrafter(Drafter):
    """row: [1, d] a residual as the decoder has them, whose dtype the heads take: the native kernel
    keeps residuals in fp32.

    When sampling, drafts are the tokens that the heads give with the noise of the model's own
    logits (runtime/noise.py).
    """

    def __init__(self, decoder: Decoder) -> None:
        start = torch.zeros(1, dtype=torch.int64, device=decoder.info.device)
        self.decoder, self.row = decoder, decoder.embed(start, np.zeros(1, np.int32))

    def noise(self, sampler: Sampler, places: Sequence[tuple[int, int]]) -> list[Noise] | None:
        """What is added to the heads' logits; None: nothing. places: of each token to draft its
        sequence, and how many drafted tokens are before it.
        """
        return sampler.noises([b for b, _ in places], [ahead for _, ahead in places])


class HeadsRunner(CapturedRunner):
    """Runs `heads`, whose outputs the model's own head reads or its rows of heads.draft_tokens."""

    heads: Any

    def __init__(self, decoder: Decoder, heads: Any) -> None:
        self.decoder, self.heads = decoder, heads
        self._capture_on(decoder)

    def logits(self, said: Tensor) -> Tensor:
        """Of what heads say [n, d], normed: float32 [n, V], −inf outside a reduced head."""
        return limited_to(self.heads.draft_tokens, self.decoder.unembed(said))

    def top(
        self, said: Tensor, count: int, noise: Sequence[Noise] | None = None
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The `count` likeliest tokens by each row of what heads say [n, d], normed, and their
        probabilities, best first. noise[i]: added to the logits of row i.
        """
        count = min(count, self.decoder.info.vocab_size)
        if noise is None and self._captured is not None:
            return self._top_captured(self._captured, self.logits, said, count)
        logits = self.logits(said)
        return self.decoder.likeliest(logits if noise is None else with_noise(logits, noise), count)
