"""Configuration of the accelerated residual that predicts experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from multirate.errors import UserError
from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.shape import BaseShape


@dataclass(frozen=True)
class ExpertPredictorConfig(MethodConfig):
    """Low-rank adapters, one per layer, that move the current residual towards that of a later
    layer. [ours]
    """

    METHOD: ClassVar[str] = "m2r2-experts"

    rank: int = 64
    """Rank of the adapters. 0 needs attention and is the default there, because the adapters add
    nothing to pruned experts.
    """
    sketch: int = 8
    """Rows of each pruned expert, a small stand-in for an expert. Pruned experts estimate how this
    layer's own experts, which have not run yet, will change the residual. 0: none.
    """
    ahead: int = 2
    """Layer i predicts the experts of layers i + 1 … i + ahead, from 1 to 8."""
    attention: bool = False
    """Runs the later layers' attention on the predicted stream, over the slow residual's K/V. A
    pruned expert is then gated like the expert and starts as its strongest neurons.
    """

    def check(self) -> None:
        least = 0 if self.attention and self.sketch else 1
        self.require_count("rank", least=least)
        self.require_count("sketch", least=0)
        self.require(1 <= self.ahead <= 8, "ahead", "1 to 8")

    @classmethod
    def for_base(cls, base: BaseShape, **options: Any) -> Self:
        """Defaults for a base, with ``options`` replacing fields. UserError for a model without
        experts.
        """
        if options.get("attention") is True:
            options = {"rank": 0, **options}
        return super().for_base(base, **options)

    def check_base(self, base: BaseShape) -> None:
        """Raises UserError for a base that has no experts or too few layers."""
        if not base.is_moe:
            raise UserError(
                f"{self.METHOD} works only with mixtures of experts, and this model is not one"
            )
        self.require(
            self.ahead < base.num_layers,
            "ahead",
            f"below the base model's {base.num_layers} layers",
        )
