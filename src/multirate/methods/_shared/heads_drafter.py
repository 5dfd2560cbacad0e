"""What drafters share whose heads read the final residual of the last verified row (Medusa,
Hydra).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.drafter import Drafter
from multirate.runtime.decoder import Decoder
from multirate.runtime.noise import Noise


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
        if sampler.greedy:
            return None
        return [sampler.noise(b, ahead) for b, ahead in places]
