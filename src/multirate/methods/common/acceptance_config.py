"""A choice that some methods leave to the user: which drafted tokens are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from multirate.decoding.acceptance import Acceptance, Exact, Typical
from multirate.methods.common.config import MethodConfig


@dataclass(frozen=True)
class AcceptanceConfig(MethodConfig):
    """acceptance: exact (the text is the model's own) or typical (lossy when sampling: see
    decoding/acceptance.py). epsilon, delta: of typical acceptance; null: the paper's 0.09 and 0.3.
    """

    acceptance: Literal["exact", "typical"] = "exact"
    epsilon: float | None = None
    delta: float | None = None

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
        """What the settings ask for."""
        if self.acceptance == "exact":
            return Exact()
        given = {"epsilon": self.epsilon, "delta": self.delta}
        return Typical(**{name: value for name, value in given.items() if value is not None})
