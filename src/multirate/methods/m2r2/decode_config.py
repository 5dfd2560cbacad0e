"""Decoding settings of m2r2 and m2r2-carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from multirate.methods.common.lookup import LookupName
from multirate.methods.common.stream_config import StreamDecodeConfig
from multirate.model.rows import MAX_TREE_BIT


@dataclass(frozen=True)
class M2R2DecodeConfig(StreamDecodeConfig):
    """StreamDecodeConfig, plus the settings of dynamic mode (lossy)."""

    METHOD: ClassVar[str] = "m2r2"

    trusted: int = 24
    """Maximum number of tokens accepted unverified in one draft. They come on top of `nodes` and
    `depth`. [ours]
    """
    trust: Literal["confidence", "arla"] = "confidence"
    """Score that decides which drafted tokens are accepted unverified: confidence (the sharpened
    top-1 probability) or arla (the trained estimate that the argmax agrees; docs/methods/m2r2.md).
    Both were measured (lab/notes/m2r2-and-eagle3.md).
    """
    exit_thresholds: tuple[float | None, ...] | None = None
    """Dynamic mode (lossy): for each gate the minimum score with which a token leaves there; null
    for a gate means never. `multirate calibrate` chooses these. With one gate, a drafted token that
    passes is emitted without verification if all before it in the draft are emitted. Null instead
    of the list: lossless decoding.
    """
    exit_score: Literal["arla", "confidence"] = "confidence"
    """Score that is compared with exit_thresholds: confidence or arla. Confidence predicts better
    on the accelerators measured so far (lab/results/README.md).
    """
    kv: Literal["deferred", "propagate"] = "deferred"
    """With several gates: what later tokens read for the layers that a token skipped. deferred:
    exact, computed with the next token that goes as deep. propagate: computed from the exit's
    residual.
    """

    def ranges(self) -> list[tuple[str, int, int]]:
        return [*super().ranges(), ("trusted", 0, MAX_TREE_BIT)]

    @property
    def leaves_early(self) -> bool:
        """Whether any token may leave early."""
        return any(threshold is not None for threshold in self.exit_thresholds or ())


@dataclass(frozen=True)
class CarryDecodeConfig(M2R2DecodeConfig):
    """M2R2DecodeConfig with suffix-automaton lookup in the text by default."""

    METHOD: ClassVar[str] = "m2r2-carry"

    lookup: int | LookupName = "sam"
    """As in StreamDecodeConfig."""
