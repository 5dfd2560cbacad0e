"""What drafters share whose heads read the final residual of the last verified row (Medusa,
Hydra).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from multirate.decoding.drafter import Drafter
from multirate.decoding.sampler import Sampler
from multirate.methods.common.acceptance_config import AcceptanceConfig
from multirate.methods.common.reduced_head import limited_to
from multirate.model.decoder import Decoder
from multirate.model.native import NativeDecoder
from multirate.model.noise import Noise, with_noise


class HeadsDrafter(Drafter):
    """row: [1, d] a residual as the decoder has them, whose dtype the heads take: the native kernel
    keeps residuals in fp32.

    When sampling, drafts are the tokens that the heads give with the noise of the model's own
    logits (model/noise.py); under typical acceptance, as in the paper, their likeliest.
    """

    def __init__(self, decoder: Decoder, config: AcceptanceConfig) -> None:
        start = torch.zeros(1, dtype=torch.int64, device=decoder.info.device)
        self.decoder, self.row = decoder, decoder.embed(start, np.zeros(1, np.int32))
        self._coupled = config.acceptance == "exact"

    def noise(self, sampler: Sampler, places: Sequence[tuple[int, int]]) -> list[Noise] | None:
        """What is added to the heads' logits; None: nothing. places: of each token to draft its
        sequence, and how many drafted tokens are before it.
        """
        if sampler.greedy or not self._coupled:
            return None
        return [sampler.noise(b, ahead) for b, ahead in places]


def likeliest(
    decoder: Decoder,
    students: Tensor,
    count: int,
    noise: Sequence[Noise] | None = None,
    tokens: Tensor | None = None,
) -> tuple[list[list[int]], list[list[float]]]:
    """The `count` likeliest tokens by each of the students [n, d], normed, and their probabilities,
    best first. noise[i]: added to the logits of row i. tokens: of a reduced head; None: all.
    """
    count = min(count, decoder.info.vocab_size)
    if isinstance(decoder, NativeDecoder) and tokens is None:
        vocab = decoder.info.vocab_size
        return decoder.top(decoder.head, vocab, students, count, noise=noise, normed=True)
    logits = limited_to(tokens, decoder.unembed(students))
    return decoder.likeliest(logits if noise is None else with_noise(logits, noise), count)
