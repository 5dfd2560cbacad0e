"""EAGLE's configuration (arXiv 2401.15077; trees: EAGLE-2, arXiv 2406.16858)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.methods._shared.branch_config import BranchDecodeConfig
from multirate.methods._shared.feature_config import FeatureConfig


@dataclass(frozen=True)
class EagleConfig(FeatureConfig):
    METHOD: ClassVar[str] = "eagle"


@dataclass(frozen=True)
class EagleDecodeConfig(BranchDecodeConfig):
    METHOD: ClassVar[str] = "eagle"
