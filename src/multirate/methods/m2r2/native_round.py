"""Whole greedy rounds of one sequence in the kernel: draft, verification and acceptance in one call from Python.

The state between two rounds is what the kernel leaves: the tokens it emitted and h_L of the accepted path, which are
the tokens to refresh (all but the last, the next root) and their carried residuals.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from multirate.backbone.native import library
from multirate.backbone.native.cache import NativeKVCache
from multirate.decoding.cost_model import CostModel
from multirate.decoding.drafter import Round
from multirate.methods.m2r2.native_runner import NativeStreamRunner


class NativeRounds:
    """Rounds of one sequence at a time; ``enter`` it, then ``run`` until it ends. Owns all buffers of a round."""

    def __init__(self, runner: NativeStreamRunner, nodes: int, width: int, top: int, sharpness: float) -> None:
        decoder, d = runner.decoder, runner.decoder.facts.hidden_size
        self._library = library.kernel()
        self._runner, self._nodes = runner, nodes
        self._ids = np.zeros(nodes + 1, np.int64)
        self._carried = torch.zeros(nodes + 1, d)
        self._tokens, self._parents = np.empty(nodes, np.int64), np.empty(nodes, np.int32)
        self._hidden = torch.empty(nodes + 1, d)
        heads = width * runner.head.outputs, (nodes + 1) * decoder.head.outputs
        self._scratch = torch.empty((5 * (nodes + 1) + 2) * d + max(heads))
        self._limits = library.TreeLimits(0, width, nodes, top, 0.0, 0.0, sharpness)
        self._round = library.Round(
            stream=runner.stream_address, draft_head=ctypes.addressof(runner.head),
            head=ctypes.addressof(decoder.head), norm=decoder.norm_address, token_map=runner.token_map,
            ids=self._ids.ctypes.data, carried=self._carried.data_ptr(), tokens=self._tokens.ctypes.data,
            parents=self._parents.ctypes.data, hidden=self._hidden.data_ptr(), scratch=self._scratch.data_ptr(),
            draft_vocab=runner.vocab, layers=decoder.facts.num_layers,
        )
        self._addresses = ctypes.addressof(self._round), ctypes.addressof(self._limits)
        self._entered = 0
        self._refresh = bool(runner.stream.blocks)

    def enter(self, seq: int, ids: Sequence[int], carried: Tensor) -> None:
        """The sequence's next round refreshes all ``ids`` but the last, its root. carried [len(ids), d]."""
        self._round.sequence = seq
        self._entered = len(ids)
        self._ids[: len(ids)] = ids
        self._carried[: len(ids)] = carried

    def run(self, depth: int, expand: float, keep: float) -> Round:
        """One round, with drafts of at most ``depth`` levels. The accepted tokens' K/V are in place, uncommitted."""
        cache, limits, length = self._runner.native_cache, self._limits, self._make_room()
        limits.depth, limits.expand, limits.keep = depth, expand, keep
        first = 0 if self._refresh else self._entered - 1
        emitted = self._library.mr_round(
            self._addresses[0], length, first, self._entered - first, self._addresses[1]
        )
        assert length + emitted <= cache.capacity
        self._entered = emitted
        return Round(self._ids[:emitted].tolist(), self._round.drafted, self._round.levels)

    def measured(self, plain: CostModel, repeats: int = 9) -> CostModel:
        """``plain`` with the draft's costs as they are inside a round: the difference between rounds of many levels and
        of one (a level alone misses that draft and verification push each other out of the caches). Uses a cache of its
        own; not during a generation."""
        most, length = min(self._nodes, 6), 40
        cache = self._runner.decoder.new_cache(1, length + self._nodes + 1)
        cache.commit(0, length)
        self._runner.begin(cache)
        taken: dict[int, list[float]] = {1: [], most: []}
        for _ in range(repeats):
            for depth in taken:
                self.enter(0, [0], torch.zeros_like(self._carried[:1]))
                self._limits.nodes = depth
                begin = time.perf_counter()
                self.run(depth, expand=0.0, keep=0.0)
                taken[depth].append(time.perf_counter() - begin)
        self._limits.nodes = self._nodes
        one, many = (statistics.median(taken[depth][1:]) for depth in (1, most))
        costs = plain.costs
        rows = costs.verify_seconds(most + 1) - costs.verify_seconds(2)
        level = max(many - one - rows, 0.0) / max(most - 1, 1)
        fixed = max(one - level - costs.verify_seconds(2), 0.0)
        return replace(plain, costs=replace(costs, draft_step=level, draft_fixed=fixed))

    def _make_room(self) -> int:
        """Room for a round in both caches; returns the sequence's committed length."""
        cache, own, record = self._runner.native_cache, self._runner.own_cache, self._round
        length: int = cache.lengths[record.sequence]
        for store in (cache, own):
            if store is not None and length + self._nodes >= store.capacity:
                store.reserve(max(length + self._nodes + 1, 2 * store.capacity))
        record.caches, record.capacity = cache.address, cache.capacity
        if isinstance(own, NativeKVCache):
            record.block_cache, record.block_capacity = own.address, own.capacity
        return length
