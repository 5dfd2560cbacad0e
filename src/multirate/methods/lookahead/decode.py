"""Drafts by n-grams that a Jacobi window collects beside the text [Fu et al. 2024]. No model, no
training.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.drafter import (
    MAX_TREE_NODES,
    Draft,
    Drafter,
    DraftRequest,
    Traits,
    Verified,
)
from multirate.methods._shared.config import MethodConfig
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache


@dataclass(frozen=True)
class LookaheadConfig(MethodConfig):
    """A pass has (ngram − 1) · (window + guesses) more rows than a plain one."""

    METHOD: ClassVar[str] = "lookahead"

    ngram: int = 3
    """Tokens in an n-gram (the paper's N)."""
    window: int = 4
    """Positions guessed ahead (W)."""
    guesses: int = 2
    """N-grams verified at once (G)."""

    def check(self) -> None:
        super().check()
        self.require(self.ngram >= 2, "ngram", "a whole number of at least 2")
        self.require_count("window", "guesses")
        self.require(
            self.window >= self.ngram - 2, "window", f"at least ngram − 2, here {self.ngram - 2}"
        )
        self.require(
            self.nodes <= MAX_TREE_NODES,
            "window",
            f"such that (ngram − 1) · (window + guesses) is at most {MAX_TREE_NODES}, the "
            "maximum number of tree nodes",
        )

    @property
    def nodes(self) -> int:
        """Maximum number of nodes in a draft."""
        return (self.ngram - 1) * (self.window + self.guesses)


_FIRST_WINDOW_SEED = 0


class LookaheadDrafter(Drafter):
    """A tree of the n-grams that began with the last token, and of the window.

    The window is guesses of the tokens to come, by level: those of level 0 in a chain below the
    last token, each one of a further level below its neighbour of the level before. What the target
    says after the last level completes an n-gram at each of the window's places, and is the last
    level of the next step's window. So the extra rows of a pass do both, and whatever of them
    happens to be the target's own text is accepted.
    """

    def __init__(self, decoder: Decoder, config: LookaheadConfig) -> None:
        self.config, self.traits = config, Traits(max_nodes=config.nodes, top=1)
        self._sequences: list[_Sequence] = []

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        """Empty pools, and windows of random tokens of the prompts."""
        self._sequences = [_Sequence(self.config, prompt) for prompt in sampler.tokens]

    def usable(self, cache: KVCache, length: int) -> int:
        return length  # whatever the pool holds, the text stays the target's

    def resume(self, cache: KVCache, sampler: Sampler) -> None:
        """Goes on with pool and window of the generation before."""

    def draft(self, request: DraftRequest) -> list[Draft]:
        drafts = []
        for (b, limit), token in zip(request.pairs, request.last_tokens, strict=True):
            sequence = self._sequences[b]
            drafts.append(sequence.draft(token) if limit else sequence.rest())
        return drafts

    def accept(self, seq: int, verified: Verified) -> None:
        assert verified.top is not None
        self._sequences[seq].learn([best[0] for best in verified.top])


class _Sequence:
    """Window and pool of one sequence."""

    def __init__(self, config: LookaheadConfig, prompt: Sequence[int]) -> None:
        self.config = config
        # a place is lost with each level that is still to come
        count = config.window + config.ngram - 2
        chosen = random.Random(_FIRST_WINDOW_SEED).choices(list(prompt), k=count)
        self._levels = [chosen]  # [at most ngram − 1][places]
        self._pool: dict[int, list[tuple[int, ...]]] = {}  # by first token, the newest last
        self._last_row: list[int] = []  # the nodes of the last level, of the last draft
        self._nodes = 0

    def rest(self) -> Draft:
        """A step without a draft."""
        self._last_row, self._nodes = [], 0
        return Draft.chain([])

    def draft(self, last_token: int) -> Draft:
        tree = _Tree()
        for ngram in reversed(self._pool.get(last_token, [])):
            node = 0
            for token in ngram:
                node = tree.below(node, token)
        nodes, chain = [], 0
        for token in self._levels[0]:
            chain = tree.below(chain, token)
            nodes.append(chain)
        for level in self._levels[1:]:
            nodes = [tree.below(node, token) for node, token in zip(nodes, level, strict=True)]
        draft, numbers = tree.by_depth()
        self._last_row, self._nodes = [numbers[node] for node in nodes], len(draft.tokens)
        return draft

    def learn(self, best: Sequence[int]) -> None:
        """best: the target's likeliest token after each node of the draft."""
        if not self._last_row or len(best) <= self._nodes:
            return  # no window, or one that was cut where the text ends
        after = [best[node] for node in self._last_row]
        if len(self._levels) < self.config.ngram - 1:
            self._levels = [level[1:] for level in [*self._levels, after]]
            return
        for first, *others in zip(*self._levels, after, strict=True):
            known, ngram = self._pool.setdefault(first, []), tuple(others)
            if ngram in known:
                known.remove(ngram)
            known.append(ngram)
            del known[: -self.config.guesses]
        self._levels = [*self._levels[1:], after]


class _Tree:
    """Nodes below the last token, node 0; equal ones are one."""

    def __init__(self) -> None:
        self._tokens, self._parents, self._depths = [0], [0], [0]
        self._known: dict[tuple[int, int], int] = {}

    def below(self, parent: int, token: int) -> int:
        node = self._known.setdefault((parent, token), len(self._tokens))
        if node == len(self._tokens):
            self._tokens.append(token)
            self._parents.append(parent)
            self._depths.append(self._depths[parent] + 1)
        return node

    def by_depth(self) -> tuple[Draft, dict[int, int]]:
        """As a draft, whose deepest nodes come last; and the number there of each node here."""
        order = sorted(range(len(self._tokens)), key=self._depths.__getitem__)
        numbers = {node: place for place, node in enumerate(order)}
        return Draft(
            [self._tokens[node] for node in order[1:]],
            [numbers[self._parents[node]] for node in order[1:]],
        ), numbers
