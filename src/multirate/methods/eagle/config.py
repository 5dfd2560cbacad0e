"""EAGLE's configuration (arXiv 2401.15077; trees: EAGLE-2, arXiv 2406.16858)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.methods.common.feature_config import FeatureConfig
from multirate.methods.common.stream_config import StreamDecodeConfig


@dataclass(frozen=True)
class EagleConfig(FeatureConfig):
    """The draft layer, and how it is trained."""

    METHOD: ClassVar[str] = "eagle"

    noise: float = 0.2
    """Training noise on the features: uniform, of this width times 512 / tokens of the sample."""
    kl_weight: float = 0.1
    """Loss weight of the token distribution, beside the features' loss."""

    def check(self) -> None:
        super().check()
        self.require(0 <= self.noise <= 10, "noise", "0 to 10")
        self.require(0 <= self.kl_weight <= 1000, "kl_weight", "0 to 1000")


@dataclass(frozen=True)
class EagleDecodeConfig(StreamDecodeConfig):
    """How drafts grow; see StreamDecodeConfig."""

    METHOD: ClassVar[str] = "eagle"
