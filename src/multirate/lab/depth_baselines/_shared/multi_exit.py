"""Exits that are trained to predict the last layer's token: objective and depth policy of the
methods that put a small module between the residual at an exit and the shared head.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from multirate.errors import UserError
from multirate.lab.depth_baselines._shared.exit_head import ExitHead
from multirate.lab.depth_baselines._shared.exits import ExitsConfig, ScoredExits
from multirate.methods._shared.distillation import Distilled, distil
from multirate.methods._shared.objective import Objective, Report, Term
from multirate.methods._shared.reduced_head import first_tokens
from multirate.methods._shared.shape import BaseShape
from multirate.methods._shared.teacher import Known, SlowPass, Teacher
from multirate.runtime.decoder import Decoder
from multirate.runtime.native import NativeDecoder


class TrainedExits(nn.Module):
    """Modules that are trained for exits of a frozen base.

    exits: layers after which there is one, increasing. draft_tokens: int64 ids of a reduced head's
    rows, increasing; None: the full head.
    """

    draft_tokens: Tensor | None

    def __init__(self, config: ExitsConfig, base: BaseShape) -> None:
        super().__init__()
        config.check_base(base)
        self.config, self.exits = config, config.exits
        self.register_buffer("draft_tokens", first_tokens(config.draft_vocab))


class ExitMaps(TrainedExits):
    """A map for each exit, which prepares the residual there for the head. maps: by exit."""

    maps: nn.ModuleDict

    def map(self, exit: int) -> Any:
        """That of an exit."""
        return self.maps[str(exit)]

    @abstractmethod
    def forward(self, exit: int, hidden: Tensor) -> Tensor:
        """Residuals [..., d] after `exit` layers → what the final norm and the head read [..., d],
        float32.
        """

    @abstractmethod
    def packed(self, decoder: NativeDecoder) -> Callable[[int, Tensor], Tensor]:
        """The same in the kernel's form, as exact as the model's own weights."""

    def of(self, decoder: Decoder) -> Callable[[int, Tensor], Tensor]:
        """The same as this decoder runs it fastest, in the residuals' dtype."""
        if isinstance(decoder, NativeDecoder):
            return self.packed(decoder)
        maps = self.to(decoder.info.device)
        return lambda exit, hidden: maps(exit, hidden).to(hidden.dtype)


class ExitObjective(Objective):
    """Base of the objectives of trained exits, alike in weight."""

    predicts = "exits"

    def __init__(self, teacher: Teacher, module: Any) -> None:
        super().__init__(teacher)
        self.module = module

    @property
    def terms(self) -> list[Term]:
        return [Term(exit, 1, 1.0) for exit in self.module.exits]

    def normed(self, slow: SlowPass, mask: Tensor) -> Tensor:
        """What the head reads of the plain residuals of `mask` [B, T] at the exits:
        [exits, N, d].
        """
        teacher = self._teacher[0]
        exits = self.module.exits
        return torch.stack([teacher.norm(slow.residual[exit][mask]) for exit in exits])


class MultiExitObjective(ExitObjective):
    """Mean over the exits of KL(head(h_L) ‖ head(map(h_exit))) on response rows (LITE's paper:
    cross-entropy with the text, at the exits and the last layer).
    """

    def forward(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[Tensor, Report]:
        teacher, maps = self._teacher[0], self.module
        slow = teacher.slow(ids, shared=0, gates=maps.exits, known=known)
        said = torch.stack([maps(exit, slow.residual[exit][mask]) for exit in maps.exits])
        students = torch.stack([teacher.norm(one) for one in said])
        result = distil(students, slow.target(mask), teacher.head, maps.draft_tokens)
        loss, weight = self.weighted(result.kl)
        loss = loss / weight + self.beside(said, slow.final[mask])
        return loss, Report(self.terms, result, float(loss.detach()))

    def beside(self, said: Tensor, final: Tensor) -> Tensor | float:
        """An additional loss of the method. said [exits, N, d]: the maps' outputs; final [N, d]:
        h_L.
        """
        return 0.0

    @torch.no_grad()
    def early_exit(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[list[Term], Distilled]:
        """The base's plain exits at the same layers: what training must beat."""
        teacher = self._teacher[0]
        slow = teacher.slow(ids, shared=0, gates=self.module.exits, known=known)
        return self.terms, distil(self.normed(slow, mask), slow.target(mask), teacher.head)


class MultiExits(ScoredExits):
    """A token leaves at the first exit where the top-1 probability after its map is at least that
    exit's threshold; None: never there. thresholds: one for each exit, or one for all.
    """

    def __init__(
        self,
        decoder: Decoder,
        maps: ExitMaps,
        thresholds: Sequence[float | None] | float | None,
    ) -> None:
        exits = maps.exits
        if not isinstance(thresholds, Sequence):
            thresholds = [thresholds] * len(exits)
        if len(thresholds) != len(exits):
            raise UserError(
                f"setting thresholds has {len(thresholds)} values; accepted: one for each of the "
                f"accelerator's exits {list(exits)}"
            )
        self._thresholds = dict(zip(exits, thresholds, strict=True))
        # nothing is looked at where nothing may leave
        looked_at = [exit for exit in exits if self._thresholds[exit] is not None]
        super().__init__(looked_at, ExitHead(decoder, maps.draft_tokens))
        self._maps = maps.of(decoder)

    def threshold(self, exit: int, seq: int) -> float | None:
        return self._thresholds[exit]

    def read(self, exit: int, hidden: Tensor) -> Tensor:
        return self._maps(exit, hidden)

    def scores(
        self, exit: int, hidden: Tensor, seqs: Sequence[int]
    ) -> tuple[list[float], Tensor | None]:
        logits = self.head.logits(self.read(exit, hidden))
        return [top for (top,) in self.head.best(logits, 1)], logits
