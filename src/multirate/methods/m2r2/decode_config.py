"""Settings of M2R2's drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from multirate.methods.common.lookup import LookupName
from multirate.methods.common.stream_config import StreamDecodeConfig
from multirate.model.rows import MAX_TREE_BIT


@dataclass(frozen=True)
class M2R2DecodeConfig(StreamDecodeConfig):
    """How drafts grow: StreamDecodeConfig, and which of them are not verified.

    trusted: trusted tokens (exit_thresholds) count neither as nodes nor as levels: so many of them
    at most come on top. [ours]
    trust: what a draft is judged by: confidence (the sharpened top-1 probability) or arla (the
    trained estimate that
    the argmax agrees: docs/methods/m2r2.md, point 5). Both were measured:
    lab/notes/m2r2-and-eagle3.md.
    exit_thresholds: dynamic mode (lossy): for each gate the least score with which a token leaves
    there, null for never; null instead of the list is lossless decoding. `multirate calibrate`
    chooses them. With one gate, a drafted token that passes is emitted without verification where
    all before it in the draft are emitted.
    exit_score: what is compared with them: confidence (the sharpened top-1 probability) or arla.
    On the accelerators measured so far the confidence knows better (lab/results/README.md).
    kv: with several gates, what later tokens read of the layers that a token skipped: deferred
    (exact, computed with the next token that goes as deep) or propagate (from the exit's residual).
    """

    METHOD: ClassVar[str] = "m2r2"

    trusted: int = 24
    trust: Literal["confidence", "arla"] = "confidence"
    exit_thresholds: tuple[float | None, ...] | None = None
    exit_score: Literal["arla", "confidence"] = "confidence"
    kv: Literal["deferred", "propagate"] = "deferred"

    def ranges(self) -> list[tuple[str, int, int]]:
        return [*super().ranges(), ("trusted", 0, MAX_TREE_BIT)]

    @property
    def leaves_early(self) -> bool:
        """Whether any token may."""
        return any(threshold is not None for threshold in self.exit_thresholds or ())


@dataclass(frozen=True)
class CarryDecodeConfig(M2R2DecodeConfig):
    """As M2R2DecodeConfig, joined to the text by its suffix automaton."""

    METHOD: ClassVar[str] = "m2r2-carry"

    lookup: int | LookupName = "sam"
