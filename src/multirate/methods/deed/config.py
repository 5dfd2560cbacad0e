"""DEED's configuration (arXiv 2311.08623), and decoding settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from multirate.methods.common.config import ExitWeights, MethodConfig
from multirate.methods.common.exits import ExitsConfig, spaced_exits
from multirate.methods.common.shape import BaseShape


@dataclass(frozen=True)
class DeedConfig(ExitsConfig):
    """An adapter before the base's head at each exit; also see ExitsConfig."""

    METHOD: ClassVar[str] = "deed"

    rank: int = 128
    """Width of an adapter."""

    @staticmethod
    def for_base(base: BaseShape, **options: Any) -> DeedConfig:
        """Six exits from a quarter of the base's layers on, as in lite (the paper: every layer)."""
        values = {"exits": spaced_exits(base.num_layers, 6, 1 / 4)} | options
        config = DeedConfig.from_json(values)
        config.check_base(base)
        return config


@dataclass(frozen=True)
class DeedDecodeConfig(MethodConfig):
    """Decoding settings."""

    METHOD: ClassVar[str] = "deed"

    threshold: float | None = 0.9
    """Minimum top-1 probability with which a token leaves. Null: no token leaves."""
    kv: Literal["propagate", "deferred"] = "deferred"
    """What later tokens read for the layers that a token skipped. deferred: the paper's features,
    computed with the next token that goes as deep. propagate: computed from the residual it left
    with.
    """
    weights: ExitWeights = "int8"
    """How the native kernel packs a reduced head: int8 or bf16. [ours]"""
