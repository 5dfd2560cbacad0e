"""FREE (arXiv 2310.05424): configuration, objective and registration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.lab.depth_baselines._shared.exits import (
    ExitsConfig,
    ThresholdConfig,
    register_exits,
)
from multirate.lab.depth_baselines._shared.linear_exits import LinearExits, start_from_least_squares
from multirate.lab.depth_baselines._shared.multi_exit import MultiExitObjective, MultiExits
from multirate.methods._shared.least_squares import direction
from multirate.methods._shared.shape import BaseShape
from multirate.methods.spec import Training


@dataclass(frozen=True)
class FreeConfig(ExitsConfig):
    """One linear map before the base's head, at one shallow exit; `exits` is a list of one layer.
    Also see ExitsConfig.
    """

    METHOD: ClassVar[str] = "free"
    FROM_BASE: ClassVar[dict[str, str]] = {"exits": "one, after L/3 layers (the paper: 8 of 24)"}

    def check(self) -> None:
        super().check()
        self.require(len(self.exits) == 1, "exits", "a list of one layer count")

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        """The exit after a third of the base's layers, the deepest of the paper's (8 of 24)."""
        return {"exits": [max(1, round(base.num_layers / 3))]}


@dataclass(frozen=True)
class FreeDecodeConfig(ThresholdConfig):
    """Decoding settings; probabilities are those of the likeliest token."""

    METHOD: ClassVar[str] = "free"


class FreeObjective(MultiExitObjective):
    """KL to the full model's distribution, and layer distillation: the squared distance of what the
    exit's map gives and of h_L, both at a mean square of one (the paper: cross-entropy with the
    text, and the squared distance of each shallow layer from the deep one it is mapped to).
    """

    def beside(self, said: Tensor, final: Tensor) -> Tensor:
        wanted = direction(final.float())
        return (direction(said, 1e-6) - wanted).square().mean()


SPEC = register_exits(
    name="free",
    title="FREE (arXiv 2310.05424; reconstructed beside a frozen base)",
    summary="skips a token's remaining layers at one shallow exit that is confident enough (lossy)",
    settings=FreeDecodeConfig,
    step=lambda decoder, module, settings: DynamicDepthStep(
        MultiExits(decoder, module, settings.threshold), "deferred"
    ),
    training=Training(FreeConfig, LinearExits, FreeObjective, start=start_from_least_squares),
)
