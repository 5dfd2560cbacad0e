"""Setting of some drafters: the rule by which drafted tokens are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from multirate.decoding.acceptance import Acceptance, Exact, Typical
from multirate.methods.common.config import MethodConfig


@dataclass(frozen=True)
class AcceptanceConfig(MethodConfig):
    """Which drafted tokens are kept."""

    acceptance: Literal["exact", "typical"] = "exact"
    """exact: the text is the model's own. typical: lossy when sampling (decoding/acceptance.py)."""
    epsilon: float | None = None
    """Of typical acceptance, between 0 and 1. Null: the paper's 0.09."""
    delta: float | None = None
    """Of typical acceptance, between 0 and 1. Null: the paper's 0.3."""

    def check(self) -> None:
        super().check()
        for name in ("epsilon", "delta"):
            value = getattr(self, name)
            typical = self.acceptance == "typical"
            self.require(
                value is None or typical, name, ("null, or set together with acceptance=typical")
            )
            self.require(value is None or 0 < value < 1, name, "null, or above 0 and below 1")

    @property
    def rule(self) -> Acceptance:
        """The acceptance rule of these settings."""
        if self.acceptance == "exact":
            return Exact()
        given = {"epsilon": self.epsilon, "delta": self.delta}
        return Typical(**{name: value for name, value in given.items() if value is not None})
