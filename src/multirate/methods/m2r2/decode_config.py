"""Decoding settings of m2r2 and m2r2-carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from multirate.methods._shared.branch_config import BranchDecodeConfig
from multirate.runtime.rows import MAX_TREE_BIT


@dataclass(frozen=True)
class M2R2DecodeConfig(BranchDecodeConfig):
    """BranchDecodeConfig, plus the settings of dynamic mode (lossy)."""

    METHOD: ClassVar[str] = "m2r2"

    unverified: int = 24
    """Maximum number of tokens accepted unverified in one draft. They come on top of `nodes` and
    `depth`. [ours]
    """
    exit_thresholds: tuple[float | None, ...] | None = None
    """Dynamic mode (lossy): for each gate the minimum score with which a token leaves there; null
    for a gate means never. `multirate calibrate` chooses these. With one gate, a drafted token that
    passes is emitted without verification if all before it in the draft are emitted. Null instead
    of the list: lossless decoding.
    """
    exit_score: Literal["arla", "confidence"] = "confidence"
    """Score that is compared with exit_thresholds: confidence (the sharpened top-1 probability) or
    arla (the trained estimate that the argmax agrees). Confidence predicts better on the
    accelerators measured so far.
    """

    def ranges(self) -> list[tuple[str, int, int]]:
        return [*super().ranges(), ("unverified", 0, MAX_TREE_BIT)]

    @property
    def leaves_early(self) -> bool:
        return any(threshold is not None for threshold in self.exit_thresholds or ())


@dataclass(frozen=True)
class CarryDecodeConfig(M2R2DecodeConfig):
    """M2R2DecodeConfig with suffix-automaton lookup in the text by default."""

    METHOD: ClassVar[str] = "m2r2-carry"

    lookup: Literal["sam", 0] = "sam"
