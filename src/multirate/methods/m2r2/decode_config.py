"""Settings of M2R2's drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from multirate.errors import UserError
from multirate.methods.common.config import DraftWeights, MethodConfig
from multirate.model.rows import MAX_TREE_BIT

MAX_CANDIDATES = 17  # of a node: the kernel's arrays end there


@dataclass(frozen=True)
class M2R2DecodeConfig(MethodConfig):
    """How drafts grow.

    depth: most levels of a draft. width: nodes drafted from per level. nodes: most nodes verified
    at once. Trusted tokens (exit_thresholds) count as neither: so many of them at most, `trusted`,
    come on top. [ours]
    sharpness: path probabilities multiply softmax(sharpness · logits) of the stream: the chance
    that a token is the argmax of the full model is larger than the probability that a draw from its
    distribution would be that token.
    sampled_candidates: likeliest tokens below a node that may be verified when sampling; when
    greedy, and at least, one more than the width.
    draft_threshold, verify_threshold: least path probability (see tree.py) of a node to draft from,
    and of a leaf to verify; None: from measured costs, so that a node is added exactly when it
    raises the expected tokens per second.
    lookup: where the last tokens (this many at most, 0: never) occurred before in the text and the
    stream's best next token is what followed there, a draft may go on as the text did, without the
    stream (tree.py). [ours]
    trust: what a draft is judged by: confidence (the sharpened top-1 probability) or arla (the
    trained estimate that
    the argmax agrees: docs/methods/m2r2.md, point 5). Both were measured: docs/experiments.md.
    drafts: which tokens are drafted when sampling. coupled: those that the stream gives with the
    noise that the model's own logits will get (model/noise.py). likeliest: the stream's
    likeliest, as when decoding greedily. drawn: drawn independently, in chains, and verified by
    rejection sampling; without lookup, and the kernel does not fuse their steps. With the first two
    the text of a seed is that of plain decoding. With a repetition penalty drafts are chains by the
    whole pipeline, drawn or coupled. All were measured: docs/experiments.md. [ours]
    exit_thresholds: dynamic mode (lossy): for each gate the least score with which a token leaves
    there, null for never; null instead of the list is lossless decoding. `multirate calibrate`
    chooses them. With one gate, a drafted token that passes is emitted without verification where
    all before it in the draft are emitted.
    exit_score: what is compared with them: confidence (the sharpened top-1 probability) or arla.
    On the accelerators measured so far the confidence knows better (docs/results.md).
    kv: with several gates, what later tokens read of the layers that a token skipped: deferred
    (exact, computed with the next token that goes as deep) or propagate (from the exit's residual).
    weights: of what only drafts (the block, the draft's head, the carry and, at gate 1, the first
    layer with its adapters) on the native kernel: int8 (half the memory read, other drafts, the
    same text) or bf16. [ours]
    """

    depth: int = 8
    width: int = 1
    nodes: int = 11
    trusted: int = 24
    sampled_candidates: int = 2
    sharpness: float = 2.0
    draft_threshold: float | None = None
    verify_threshold: float | None = None
    lookup: int = 0
    trust: Literal["confidence", "arla"] = "confidence"
    drafts: Literal["coupled", "likeliest", "drawn"] = "coupled"
    weights: DraftWeights = "int8"
    exit_thresholds: tuple[float | None, ...] | None = None
    exit_score: Literal["arla", "confidence"] = "confidence"
    kv: Literal["deferred", "propagate"] = "deferred"

    def check(self) -> None:
        for name, low, high in (
            ("depth", 1, 32),
            ("width", 1, 16),
            ("nodes", 1, MAX_TREE_BIT),
            ("trusted", 0, MAX_TREE_BIT),
            ("lookup", 0, 64),
            ("sampled_candidates", 1, MAX_CANDIDATES),
        ):
            if not low <= getattr(self, name) <= high:
                raise UserError(
                    f"m2r2 setting {name}={getattr(self, name)} is out of range; accepted: {low} "
                    f"to {high}"
                )
        if not self.sharpness > 0:
            raise UserError(
                f"m2r2 setting sharpness={self.sharpness} is out of range; accepted: above 0"
            )
        for name in ("draft_threshold", "verify_threshold"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise UserError(
                    f"m2r2 setting {name}={value} is out of range; accepted: 0 to 1, or None"
                )

    @property
    def leaves_early(self) -> bool:
        """Whether any token may."""
        return any(threshold is not None for threshold in self.exit_thresholds or ())


@dataclass(frozen=True)
class CarryDecodeConfig(M2R2DecodeConfig):
    """As M2R2DecodeConfig, with lookup."""

    lookup: int = 4
