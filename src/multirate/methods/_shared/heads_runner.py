"""What runners of heads that read the final residual of the last verified row share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from multirate.methods._shared.captured_runner import CapturedRunner
from multirate.methods._shared.reduced_head import limited_to
from multirate.runtime.decoder import Decoder
from multirate.runtime.noise import Noise, with_noise


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
