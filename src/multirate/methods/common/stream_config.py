"""Settings of drafts that grow from a trained stream (stream_drafter.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from multirate.errors import UserError
from multirate.methods.common.config import DraftWeights, MethodConfig, PromptWeights
from multirate.methods.common.lookup import LookupName, check_texts
from multirate.model.rows import MAX_TREE_BIT

TUNABLE = {"nodes": (7, 11, 16), "depth": (4, 8), "width": (1, 2)}
"""For ``MethodSpec.tunable``: the settings that shape a tree."""
MAX_DEPTH = 32
MAX_WINDOW = 1 << 30
MAX_CANDIDATES = 17  # of a node: the kernel's arrays end there


@dataclass(frozen=True)
class StreamDecodeConfig(MethodConfig):
    """How drafts grow.

    depth: most levels of a draft. width: nodes drafted from per level. nodes: most nodes verified
    at once.
    sharpness: path probabilities multiply softmax(sharpness · logits) of the stream: the chance
    that a token is the argmax of the full model is larger than the probability that a draw from its
    distribution would be that token.
    sampled_candidates: likeliest tokens below a node that may be verified when sampling; when
    greedy, and at least, one more than the width.
    draft_threshold, verify_threshold: least path probability (see draft_tree.py) of a node to draft
    from, and of a leaf to verify; None: from measured costs, so that a node is added exactly when
    it raises the expected tokens per second.
    lookup: where the last tokens (this many at most, 0: never) occurred before in the text, a draft
    may go on as the text did, without the stream (draft_tree.py). Instead of a number: ngram, the
    default one, or sam, matches of any length by the text's suffix automaton. [ours]
    texts: a file of other texts (`multirate texts`) in which the last tokens are looked up, too; a
    model's name: those that the package has of it. [ours, as REST]
    drafts: which tokens are drafted when sampling. coupled: those that the stream gives with the
    noise that the model's own logits will get (model/noise.py). likeliest: the stream's
    likeliest, as when decoding greedily. drawn: drawn independently, in chains, and verified by
    rejection sampling; without lookup, and the kernel does not fuse their steps. With the first two
    the text of a seed is that of plain decoding. With a repetition penalty drafts are chains by the
    whole pipeline, drawn or coupled. All were measured: docs/experiments.md. [ours]
    window: tokens that the stream's own layer sees on the native kernel, the newest ones: of a long
    prompt no others are read before the first draft. None: all. [ours]
    weights: of what only drafts on the native kernel: int4 (a third of the memory read, other
    drafts, the same text), int8 (half of it) or bf16. [ours]
    staged: drafts are first verified with a narrow copy of the model's weights, and up to so many
    tokens of it at once by the model's own: lossless, and faster where the copy is read in much
    less time (stages.py). Decoding of one sequence by argmax, with or without temperature, on the
    native kernel, where the processor multiplies bytes; the copy is made after 300 tokens.
    0: never. [ours]
    margin: dynamic mode (lossy): drafts are verified with a narrow copy of the model's weights,
    and a token whose two likeliest candidates' logits are less than this apart is decided by the
    model's own; None: all are. Greedy decoding of one sequence on the native kernel, where the
    processor multiplies bytes; elsewhere all are verified with the model's own weights. [ours]
    prompt_weights: what reads prompts where there is a margin: own, or narrow, the copy, which
    takes less time and changes some tokens. [ours]
    """

    depth: int = 8
    width: int = 2
    nodes: int = 11
    sampled_candidates: int = 2
    sharpness: float = 2.0
    draft_threshold: float | None = None
    verify_threshold: float | None = None
    lookup: int | LookupName = 0
    texts: str | None = None
    drafts: Literal["coupled", "likeliest", "drawn"] = "coupled"
    window: int | None = 256
    weights: DraftWeights = "int4"
    margin: float | None = None
    prompt_weights: PromptWeights = "own"
    staged: int = 11

    def check(self) -> None:
        for name, low, high in self.ranges():
            value = getattr(self, name)
            if not isinstance(value, str) and not low <= value <= high:
                raise UserError(
                    f"{self.METHOD} setting {name}={value} is out of range; "
                    f"accepted: {low} to {high}"
                )
        if not self.sharpness > 0:
            raise UserError(
                f"{self.METHOD} setting sharpness={self.sharpness} is out of range; "
                "accepted: above 0"
            )
        check_texts(self, self.texts, bool(self.lookup))
        if self.margin is not None and not self.margin >= 0:
            raise UserError(
                f"{self.METHOD} setting margin={self.margin} is out of range; accepted: 0 or above "
                "(logits), or None"
            )
        self.require(
            self.prompt_weights == "own" or self.margin is not None,
            "prompt_weights",
            "own, or narrow with a margin beside it",
        )
        if self.window is not None and not 1 <= self.window <= MAX_WINDOW:
            raise UserError(
                f"{self.METHOD} setting window={self.window} is out of range; accepted: 1 to "
                f"{MAX_WINDOW}, or None"
            )
        for name in ("draft_threshold", "verify_threshold"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise UserError(
                    f"{self.METHOD} setting {name}={value} is out of range; "
                    "accepted: 0 to 1, or None"
                )

    def ranges(self) -> list[tuple[str, int, int]]:
        """Whole numbers: their names, least and greatest values."""
        return [
            ("depth", 1, MAX_DEPTH),
            ("width", 1, 16),
            ("nodes", 1, MAX_TREE_BIT),
            ("lookup", 0, 64),
            ("staged", 0, MAX_TREE_BIT),
            ("sampled_candidates", 1, MAX_CANDIDATES),
        ]
