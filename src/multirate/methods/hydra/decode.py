"""Hydra as a drafter: a tree grows level by level, head k reading the path of each of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.drafter import Draft, DraftRequest, Traits, Verified
from multirate.methods._shared.draft_tree import DraftTree
from multirate.methods._shared.heads import HeadsDrafter
from multirate.methods.hydra.config import HydraDecodeConfig
from multirate.methods.hydra.modules import HydraHeads
from multirate.methods.hydra.runner import make_runner
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows

_ROWS = 1024  # of one call of the prefix layer; bounds the memory of its attention


@dataclass
class _Verified:
    """What is known of a sequence's verified tokens. count: how many the prefix layer has read;
    pending: h_L [n, d] of those after them.
    """

    count: int = 0
    pending: list[Tensor] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.count + sum(len(part) for part in self.pending)


class HydraDrafter(HeadsDrafter):
    """Verified tokens are read by the prefix layer when the next draft is made."""

    def __init__(self, decoder: Decoder, heads: HydraHeads, config: HydraDecodeConfig) -> None:
        super().__init__(decoder)
        self.heads, self.config = heads.to(self.row.dtype), config
        self.runner = make_runner(decoder, self.heads, config.weights)
        self.depth = min(config.depth or heads.config.heads, heads.config.heads)
        self.traits = Traits(max_nodes=config.nodes)
        self._draft_threshold = np.full(config.nodes, config.draft_threshold, np.float64)
        self._verify_threshold = np.full(config.nodes, config.verify_threshold, np.float64)
        self._cache: KVCache | None = None
        self._own: KVCache | None = None
        self._verified: dict[int, _Verified] = {}

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        self._cache, self._verified = cache, {}
        self._own = None  # its memory may be the next one's
        self._own = self.runner.new_cache(cache.batch, cache.capacity)

    def usable(self, cache: KVCache, length: int) -> int:
        known = self._verified.get(0)
        return min(length, known.total) if known and cache is self._cache else 0

    def resume(self, cache: KVCache, sampler: Sampler) -> None:
        """Goes on with what the prefix layer has read, and is still to read, of the kept tokens."""
        known = self._verified.get(0)
        self._cache, self._verified = cache, {}
        if known is not None:
            self._verified[0] = self._first(known, cache.lengths[0])

    def prefill(
        self,
        seqs: Sequence[int],
        prompts: Sequence[Sequence[int]],
        hidden_final: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        for b, hidden in zip(seqs, hidden_final, strict=True):
            self._verified.setdefault(b, _Verified()).pending.append(hidden)

    def accept(self, seq: int, verified: Verified) -> None:
        self._verified.setdefault(seq, _Verified()).pending.append(verified.accepted)

    def _first(self, known: _Verified, kept: int) -> _Verified:
        """What is known of the first `kept` tokens."""
        count = min(known.count, kept)
        pending = torch.cat([self.row[:0], *known.pending])[: kept - count]
        return _Verified(count, [pending])

    def behind(self, seqs: Sequence[int]) -> int:
        return sum(len(part) for b in seqs for part in self._verified[b].pending)

    def trial_step(self) -> Callable[[], object]:
        return self._first_head

    @torch.no_grad()
    def _first_head(self) -> object:
        return self.runner.best(1, self.row, [0], np.zeros(1, np.int32), self._candidates)

    @torch.no_grad()
    def draft(self, request: DraftRequest) -> list[Draft]:
        """One pass of head k over the nodes of depth k - 1 of all sequences."""
        seqs, limits = request.seqs, request.limits
        if not max(limits):
            return [Draft([], []) for _ in seqs]
        trees = [DraftTree(min(self.depth, limit)) for limit in limits]
        nodes = [(i, 0) for i, limit in enumerate(limits) if limit]
        z = torch.cat([self._read(seqs[i]) for i, _ in nodes])
        tokens = [request.last_tokens[i] for i, _ in nodes]
        for k in range(1, self.depth + 1):
            places = [(seqs[i], k - 1) for i, _ in nodes]
            z, (ids, probs) = self.runner.best(
                k,
                z,
                tokens,
                self._positions(places),
                self._candidates,
                self.noise(request.sampler, places),
            )
            row_of = {node: row for row, node in enumerate(nodes)}
            nodes = self._grow(trees, nodes, ids, probs)
            if not nodes:
                break
            z = z[[row_of[i, trees[i].parents[node - 1]] for i, node in nodes]]
            tokens = [trees[i].tokens[node - 1] for i, node in nodes]
        for tree in trees:
            tree.finish(self._verify_threshold)
        return [Draft(tree.tokens, tree.parents) for tree in trees]

    def _grow(
        self,
        trees: Sequence[DraftTree],
        nodes: Sequence[tuple[int, int]],
        ids: Sequence[Sequence[int]],
        probs: Sequence[Sequence[float]],
    ) -> list[tuple[int, int]]:
        """The nodes to draft from next below `nodes`, (tree, node) tree after tree, for which ids
        and probs have the candidates.
        """
        chosen, at = [], 0
        for i, group in groupby(nodes, key=itemgetter(0)):
            frontier = [node for _, node in group]
            part = slice(at, at + len(frontier))
            at = part.stop
            grown = trees[i].grow(
                frontier,
                ids[part],
                probs[part],
                self.config.width,
                self._draft_threshold,
                self._verify_threshold,
            )
            chosen += [(i, node) for node in grown]
        return chosen

    def _positions(self, places: Sequence[tuple[int, int]]) -> NDArray[np.int32]:
        """Of tokens: of each its sequence, and its depth."""
        assert self._cache is not None
        lengths = self._cache.lengths
        return np.array([lengths[b] + depth for b, depth in places], np.int32)

    def _read(self, seq: int) -> Tensor:
        """What the heads read of the sequence's last verified token: x [1, d]."""
        known = self._verified[seq]
        hidden = known.pending[0] if len(known.pending) == 1 else torch.cat(known.pending)
        assert self._own is not None
        for part in hidden.split(_ROWS):
            rows = Rows.causal(seq, known.count, len(part))
            out = self.runner.prefixed(part, rows, self._own)
            known.count += len(part)
        known.pending = []
        return out[-1:]

    @property
    def _candidates(self) -> int:
        """Tokens looked at below a node."""
        return self.config.width + 1
