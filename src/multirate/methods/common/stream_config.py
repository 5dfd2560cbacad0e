"""Settings of drafts that grow from a trained stream (stream_drafter.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from multirate.methods.common.config import DraftWeights, PromptWeights
from multirate.methods.common.lookup import LookupName, check_texts
from multirate.methods.common.staged_config import StagedTextConfig
from multirate.model.rows import MAX_TREE_BIT

TUNABLE = {"nodes": (7, 11, 16), "depth": (4, 8), "width": (1, 2)}
"""For ``MethodSpec.tunable``: the settings that shape a tree."""
MAX_DEPTH = 32
MAX_WINDOW = 1 << 30
MAX_CANDIDATES = 17  # of a node: the kernel's arrays end there


@dataclass(frozen=True)
class StreamDecodeConfig(StagedTextConfig):
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
    whole pipeline, drawn or coupled. All were measured: lab/notes/sampling.md. [ours]
    window: tokens that the stream's own layer sees on the native kernel, the newest ones: of a long
    prompt no others are read before the first draft. None: all. [ours]
    weights: of what only drafts on the native kernel: int4 (a third of the memory read, other
    drafts, the same text), int8 (half of it) or bf16. [ours]
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

    def check(self) -> None:
        super().check()
        for name, low, high in self.ranges():
            value = getattr(self, name)
            self.require(isinstance(value, str) or low <= value <= high, name, f"{low} to {high}")
        self.require(self.sharpness > 0, "sharpness", "above 0")
        check_texts(self, self.texts, bool(self.lookup))
        self.require(
            self.margin is None or self.margin >= 0, "margin", "0 or above (logits), or null"
        )
        self.require(
            self.prompt_weights == "own" or self.margin is not None,
            "prompt_weights",
            "own, or narrow together with a margin",
        )
        self.require(
            self.window is None or 1 <= self.window <= MAX_WINDOW,
            "window",
            f"1 to {MAX_WINDOW}, or null",
        )
        self.require_share("draft_threshold", "verify_threshold")

    def ranges(self) -> list[tuple[str, int, int]]:
        """Whole numbers: their names, least and greatest values."""
        return [
            ("depth", 1, MAX_DEPTH),
            ("width", 1, 16),
            ("nodes", 1, MAX_TREE_BIT),
            ("lookup", 0, 64),
            ("sampled_candidates", 1, MAX_CANDIDATES),
        ]
