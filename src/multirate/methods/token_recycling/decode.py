"""Drafts from an adjacency matrix of the target's own runners-up [Luo et al. 2024]. No training."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.drafter import (
    MAX_TREE_NODES,
    Draft,
    Drafter,
    DraftRequest,
    Traits,
    Verified,
)
from multirate.methods._shared.joined_drafter import JoinedConfig
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache

STATIC_TREE = (4, 4, 3, 2)
"""Nodes of a draft at depth 1, 2, …"""


@dataclass(frozen=True)
class TokenRecyclingConfig(JoinedConfig):
    METHOD: ClassVar[str] = "token_recycling"

    k: int = 8
    """How many successors of each token are remembered."""
    nodes: int = 16
    """Maximum number of nodes in a draft. It grows by how often successors of each rank were
    accepted lately, weighed against a row's measured cost [ours]. While that cost is unknown it
    has 4, 4, 3 and 2 nodes at depth 1 to 4.
    """

    def check(self) -> None:
        super().check()
        self.require(1 <= self.k <= 64, "k", "a whole number from 1 to 64")
        self.require(1 <= self.nodes <= MAX_TREE_NODES, "nodes", f"from 1 to {MAX_TREE_NODES}")


_MEMORY = 0.995  # of rates, by token: about the last two hundred
_FIRST_RATE, _FALLING, _GUESSED = 0.35, 0.5, 20.0


class TokenRecyclingDrafter(Drafter):
    """A tree over the `k` likeliest successors last seen after each token.

    Every row that the target computes, rejected ones included, renews the entry of its token. All
    sequences of a batch share the matrix; a generation begins with an empty one.
    """

    def __init__(self, decoder: Decoder, config: TokenRecyclingConfig) -> None:
        self.decoder = decoder
        top = min(config.k, decoder.info.vocab_size)
        self.tree = static_tree(STATIC_TREE, top)
        self._grown_nodes = config.nodes  # of a draft, at most
        self.traits = Traits(max_nodes=max(len(self.tree), config.nodes), top=top)
        self._successors: dict[int, list[int]] = {}
        self.rates = RankRates(top)
        self._sampler: Sampler | None = None

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        self._successors = {}
        self._sampler = sampler

    def usable(self, cache: KVCache, length: int) -> int:
        return length  # whatever the matrix holds, the text stays the target's

    def resume(self, cache: KVCache, sampler: Sampler) -> None:
        """Goes on with the matrix of the generation before."""
        self._sampler = sampler

    def draft(self, request: DraftRequest) -> list[Draft]:
        """Where a token was never seen, the tree has no nodes below it."""
        last_tokens = request.last_tokens
        if request.worth is not None:
            worth = request.worth[: self._grown_nodes]
            return [
                self._grow(token, worth) if limit else Draft([], [])
                for token, limit in zip(last_tokens, request.limits, strict=True)
            ]
        return [self._expand(token) for token in last_tokens]

    def accept(self, seq: int, verified: Verified) -> None:
        """Every row renews its token's successors; where a token has several, an accepted row
        wins.
        """
        assert verified.top is not None and self._sampler is not None
        tokens, top = verified.tokens, verified.top
        emitted = [*(tokens[row] for row in verified.path[1:]), self._sampler.tokens[seq][-1]]
        for row, token in zip(verified.path, emitted, strict=True):
            if tokens[row] in self._successors:
                self.rates.observe(self._successors[tokens[row]], token)
        self._successors.update(zip(tokens, top, strict=True))
        self._successors.update((tokens[row], top[row]) for row in verified.path)

    def _grow(self, last_token: int, worth: np.ndarray) -> Draft:
        """The likeliest nodes, as long as the next one is worth its row: the chance of each is the
        product of its path's ranks' rates.
        """
        tokens: list[int] = []
        parents: list[int] = []
        found = [(-1.0, 0, -1, last_token)]  # (−chance, order of finding, parent, token)
        count = 0
        while found:
            chance, _, parent, token = heapq.heappop(found)
            if parent >= 0:
                if len(tokens) == len(worth) or -chance < worth[len(tokens)]:
                    break
                tokens.append(token)
                parents.append(parent)
            for rank, successor in enumerate(self._successors.get(token, ())):
                below = chance * self.rates.of[rank]
                if -below < worth[0]:
                    break
                count += 1
                heapq.heappush(found, (below, count, len(tokens), successor))
        return Draft(tokens, parents)

    def _expand(self, last_token: int) -> Draft:
        tokens, parents = [last_token], []
        numbers = [
            0
        ]  # of each node of the static tree its number in the draft; -1: it is not there
        for parent, rank in self.tree:
            above = numbers[parent]
            successors = self._successors.get(tokens[above], ()) if above >= 0 else ()
            if rank < len(successors):
                numbers.append(len(tokens))
                tokens.append(successors[rank])
                parents.append(above)
            else:
                numbers.append(-1)
        return Draft(tokens[1:], parents)


class RankRates:
    """How often the token after another was its successor of each rank, lately: `of` [k], not
    rising, so that a likelier successor never comes after a less likely one.
    """

    def __init__(self, k: int) -> None:
        # a first guess, which counts as _GUESSED tokens
        self._right = _GUESSED * _FIRST_RATE * _FALLING ** np.arange(k)
        self._asked = _GUESSED
        self.of = self._right / self._asked

    def observe(self, successors: Sequence[int], token: int) -> None:
        """`token` came after one with these successors."""
        self._right *= _MEMORY
        self._asked = _MEMORY * self._asked + 1
        if token in successors:
            self._right[successors.index(token)] += 1
        self.of = np.minimum.accumulate(self._right / self._asked)


def static_tree(widths: Sequence[int], k: int) -> list[tuple[int, int]]:
    """(parent node, rank among its successors) of nodes 1, 2, …, breadth first; node 0 is the last
    token.

    Depth d has the `widths[d - 1]` nodes whose ranks (from 1) along the path have the least
    product: the likeliest successor gets the most nodes below it. [ours; the paper's tree of 80
    nodes was fitted to its models]
    """
    nodes: list[tuple[int, int]] = []
    level = [(1, 0)]  # (product of the ranks, node)
    for width in widths:
        options = ((cost * (rank + 1), node, rank) for cost, node in level for rank in range(k))
        chosen = sorted(options)[:width]
        level = [(cost, len(nodes) + i) for i, (cost, _, _) in enumerate(chosen, start=1)]
        nodes += [(node, rank) for _, node, rank in chosen]
    return nodes
