"""FREE as a depth policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multirate.decoding.session import Session
from multirate.methods.common.exit_head import ExitHead
from multirate.methods.common.linear_exits import maps_of
from multirate.methods.common.multi_exit import MultiExits
from multirate.methods.free.adaptive_threshold import AdaptiveThreshold
from multirate.methods.free.config import FreeDecodeConfig
from multirate.methods.free.modules import ShallowExit
from multirate.model.decoder import Decoder


class AdaptiveExit(MultiExits):
    """The one exit at a threshold that moves between texts, and so depends on those before.

    Every token's confidence and likeliest token at the exit are kept until its deeper layers have
    run, which tell whether they say the same (`DepthPolicy.final_logits`).
    """

    checks_waiting = True

    def __init__(
        self, decoder: Decoder, exits: ShallowExit, settings: FreeDecodeConfig, head: ExitHead
    ) -> None:
        assert settings.threshold is not None and settings.adaptive is not None
        super().__init__(exits.exits, head, maps_of(decoder, exits), [settings.threshold])
        self._decoder = decoder
        self._adaptive = AdaptiveThreshold(settings.threshold, settings.adaptive)
        self._seen: dict[int, list[tuple[float, int]]] = {}

    def begin(self, session: Session) -> None:
        super().begin(session)
        self._seen = {}
        self._adaptive.update()

    def threshold(self, exit: int, seq: int) -> float | None:
        return self._adaptive.threshold

    def scores(
        self, exit: int, hidden: Tensor, seqs: Sequence[int]
    ) -> tuple[list[float], Tensor | None]:
        logits = self.head.logits(self.read(exit, hidden))
        places, probabilities = self._decoder.likeliest(logits, 1)
        scores = [row[0] for row in probabilities]
        tokens = (
            self.head.tokens(torch.tensor(places, device=hidden.device, dtype=torch.int64))
            .flatten()
            .tolist()
        )
        for seq, score, token in zip(seqs, scores, tokens, strict=True):
            self._seen.setdefault(seq, []).append((score, token))
        return scores, logits

    def final_logits(self, logits: Sequence[Tensor], seqs: Sequence[int]) -> None:
        for seq, said in zip(seqs, logits, strict=True):
            deep = self._decoder.top_tokens(said, 1)
            for (confidence, token), (deeper,) in zip(self._seen.pop(seq), deep, strict=True):
                self._adaptive.observe(confidence, token == deeper)


def policy_of(decoder: Decoder, exits: ShallowExit, settings: FreeDecodeConfig) -> MultiExits:
    """The policy at the one exit."""
    head = ExitHead(decoder, exits.draft_tokens, settings.weights)
    if settings.adaptive is not None:
        return AdaptiveExit(decoder, exits, settings, head)
    return MultiExits(exits.exits, head, maps_of(decoder, exits), [settings.threshold])
