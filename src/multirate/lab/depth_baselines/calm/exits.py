"""CALM as a depth policy: three confidences, and a threshold that decays over the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from multirate.decoding.session import Session
from multirate.lab.depth_baselines._shared.exit_head import ExitHead, first_of_vocabulary
from multirate.lab.depth_baselines._shared.exits import ScoredExits, check_exits
from multirate.lab.depth_baselines.calm.config import CalmConfig, CalmDecodeConfig, default_exits
from multirate.lab.depth_baselines.calm.modules import ExitClassifiers
from multirate.runtime.decoder import Decoder


def untrained_exits(decoder: Decoder, config: CalmConfig) -> CalmExits:
    """The policy without training. UserError for exits or a head that the model does not have."""
    layers = decoder.info.num_layers
    check_exits(config.exits, layers, "calm's")
    head = ExitHead(decoder, first_of_vocabulary(decoder, config.draft_vocab))
    exits = config.exits or default_exits(layers)
    return CalmExits(decoder, exits, head, config, config.confidence)


def trained_exits(
    decoder: Decoder, classifiers: ExitClassifiers, config: CalmDecodeConfig
) -> CalmExits:
    """The policy at the exits of trained classifiers, over their reduced head."""
    head = ExitHead(decoder, classifiers.draft_tokens)
    # the decoder's residuals decide the dtype: the native kernel keeps them in fp32
    start = torch.zeros(1, dtype=torch.int64, device=decoder.info.device)
    like = decoder.embed(start, np.zeros(1, np.int32))
    classifiers = classifiers.to(like.device, like.dtype)
    return CalmExits(decoder, classifiers.exits, head, config, classifiers)


class CalmExits(ScoredExits):
    """A token leaves at the first exit where its confidence passes λ(t).

    Only the softmax confidence needs logits at every exit; the others apply the head where a token
    leaves.
    """

    def __init__(
        self,
        decoder: Decoder,
        exits: Sequence[int],
        head: ExitHead,
        config: CalmDecodeConfig,
        confidence: Literal["softmax", "state"] | ExitClassifiers,
    ) -> None:
        # without a threshold nothing is looked at
        super().__init__(exits if config.threshold is not None else (), head)
        self._decoder, self._config, self._confidence = decoder, config, confidence
        self._before: tuple[list[int], Tensor] | None = None  # the rows of the last exit

    def begin(self, session: Session) -> None:
        super().begin(session)
        self._before = None

    def threshold(self, exit: int, seq: int) -> float | None:
        limit = self._config.threshold
        if limit is None or self._config.decay == 0:
            return limit
        assert self._session is not None
        most = max(1, self._session.stops.total_room(seq))
        return decayed(limit, self._config.decay, self.emitted(seq) / most)

    def scores(
        self, exit: int, hidden: Tensor, seqs: Sequence[int]
    ) -> tuple[list[float], Tensor | None]:
        if self._confidence == "softmax":
            logits = self.head.logits(hidden)
            return [first - second for first, second in self.head.best(logits, 2)], logits
        if self._confidence == "state":
            return self._saturation(exit, hidden, list(seqs)), None
        which, normed = self.exits.index(exit), self._decoder.norm(hidden)
        scores: list[float] = self._confidence.score(which, normed).tolist()
        return scores, None

    def _saturation(self, exit: int, hidden: Tensor, seqs: list[int]) -> list[float]:
        """Cosine of each row [n, d] and the same sequence's at the exit before."""
        before, self._before = self._before, (seqs, hidden)
        if exit == self.exits[0]:
            return [-math.inf] * len(seqs)
        assert before is not None
        places = {b: i for i, b in enumerate(before[0])}
        earlier = before[1] if before[0] == seqs else before[1][[places[b] for b in seqs]]
        cosine = torch.cosine_similarity(hidden.float(), earlier.float(), dim=-1)
        found: list[float] = cosine.tolist()
        return found


def decayed(threshold: float, decay: float, progress: float) -> float:
    """λ(t) for t / T = progress."""
    return 0.9 * threshold + 0.1 * threshold * math.exp(-decay * progress)
