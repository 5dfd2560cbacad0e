"""Mixture-of-Depths as a step: each token of a batch runs its own set of blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from multirate.decoding.session import Session
from multirate.decoding.step import Hole, Step
from multirate.lab.depth_baselines.mixture_of_depths.config import MixtureOfDepthsDecodeConfig
from multirate.lab.depth_baselines.mixture_of_depths.modules import EPS, Routers, refuse_windows
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.native import NativeDecoder, abi
from multirate.runtime.native.packing import Owner
from multirate.runtime.rows import Rows


class MixtureOfDepthsStep(Step):
    """One token per sequence and step; nothing is verified.

    A token that passes a block by leaves no K/V there, and later tokens read none of it: in a
    routed block's cache the tokens that ran it lie side by side, each with its own position, so
    that no slot is empty. Up to the first token that passed some block by, slots are positions.

    fused: where the native kernel runs, all of a pass's layers are one call.
    """

    lossless = False

    def __init__(
        self,
        decoder: Decoder,
        routers: Routers,
        settings: MixtureOfDepthsDecodeConfig,
        fused: bool = True,
    ) -> None:
        refuse_windows(decoder.info.windows, routers.config.blocks)
        self._routers = routers.to(decoder.info.device)
        self._blocks = routers.config.blocks if settings.threshold is not None else ()
        self._limit = logit(settings.threshold or 0.0)
        self._slots = np.zeros((0, 0), np.int32)  # [blocks, sequences] used in the blocks' caches
        self._lengths: dict[int, int] = {}
        self._packed = None
        if fused and isinstance(decoder, NativeDecoder) and not decoder.info.num_experts:
            self._packed = _Packed(decoder, routers, self._blocks, self._limit)

    def begin(self, session: Session, resumed: bool) -> None:
        self._slots = np.zeros((len(self._blocks), len(session.prompts)), np.int32)
        self._lengths = {}
        if self._packed is not None:
            self._packed.begin(self._slots)

    def prefilled(
        self,
        session: Session,
        seqs: Sequence[int],
        hidden: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        for b in seqs:
            self._slots[:, b] = self._lengths[b] = session.cache.lengths[b]

    def holes(self, seq: int) -> list[Hole]:
        length = self._lengths.get(seq, 0)
        return [
            Hole(int(used), length, block, block + 1)
            for block, used in zip(self._blocks, self._slots[:, seq], strict=True)
            if used < length
        ]

    def run(self, session: Session) -> None:
        seqs, decoder, cache = session.active, session.decoder, session.cache
        layers, lengths = decoder.info.num_layers, [cache.lengths[b] for b in seqs]
        rows = Rows.concat([Rows.causal(b, at, 1) for b, at in zip(seqs, lengths, strict=True)])
        ids = [session.sampler.tokens[b][-1] for b in seqs]
        x = decoder.embed(
            torch.tensor(ids, device=decoder.info.device, dtype=torch.int64), rows.pos
        )
        if self._packed is not None:
            x, ran = self._packed(x, rows, cache)
        else:
            x, ran = self._run(session, x, rows)
        tokens = session.sampler.choose(decoder.logits(x), seqs)
        for b, length, count, token in zip(seqs, lengths, ran, tokens, strict=True):
            session.stats.count_exits(count, 1)
            if count < layers:
                session.note_inexact(b, length)
            self._lengths[b] = length + 1
            cache.commit(b, 1)
            session.emit(b, [token])

    def _run(self, session: Session, x: Tensor, rows: Rows) -> tuple[Tensor, list[int]]:
        """All layers on the rows of the active sequences, x [n, d], but those that they pass by →
        ([n, d], how many layers each has run).
        """
        seqs, decoder, cache = session.active, session.decoder, session.cache
        ran, at = [decoder.info.num_layers] * len(seqs), 0
        for which, block in enumerate(self._blocks):
            x = decoder.layers(x, rows, at, block, cache)
            scores: list[float] = self._routers.left_out(which, x).tolist()
            # a score that is not a number passes nothing by
            runs = [i for i, score in enumerate(scores) if not score >= self._limit]
            for i in set(range(len(seqs))).difference(runs):
                ran[i] -= 1
            if runs:
                x = self._block(session, which, x, [seqs[i] for i in runs], runs)
            at = block + 1
        return decoder.layers(x, rows, at, decoder.info.num_layers, cache), ran

    def _block(
        self, session: Session, which: int, x: Tensor, seqs: list[int], at: list[int]
    ) -> Tensor:
        """A routed block on the rows `at` of x [n, d], those of `seqs`."""
        slots = self._slots[which, seqs]
        rows = Rows(
            np.array(seqs, np.int32),
            slots,
            np.array([session.cache.lengths[b] for b in seqs], np.int32),
            slots + np.int32(1),
            np.zeros(len(seqs), np.int64),
        )
        block = self._blocks[which]
        every = len(at) == len(x)
        after = session.decoder.layers(x if every else x[at], rows, block, block + 1, session.cache)
        self._slots[which, seqs] += 1
        if every:
            return after
        x = x.clone()
        x[at] = after
        return x


class _Packed:
    """All layers of a pass in one kernel call. The native kernel only."""

    def __init__(
        self, decoder: NativeDecoder, routers: Routers, blocks: Sequence[int], limit: float
    ) -> None:
        self._decoder, self._blocks, self._limit = decoder, blocks, limit
        self._owner = Owner()
        self._weights = [self._owner.floats(row) for row in routers.predictor]
        self._bias: list[float] = routers.bias.float().tolist()
        self._by: abi.CData = None

    def begin(self, slots: np.ndarray) -> None:
        """The counts of slots [blocks, sequences], int32, which it keeps up to date."""
        by = [abi.new("PassBy") for _ in range(self._decoder.info.num_layers)]
        self._slots = slots  # the kernel has its address
        for which, block in enumerate(self._blocks):
            by[block].weight = abi.at(self._weights[which])
            by[block].bias = self._bias[which]
            by[block].slots = abi.at(slots[which].ctypes.data)
        self._by = abi.array("PassBy", by)

    def __call__(self, x: Tensor, rows: Rows, cache: KVCache) -> tuple[Tensor, list[int]]:
        return self._decoder.passing_layers(x, rows, cache, self._by, self._limit, EPS)


def logit(probability: float) -> float:
    """The logit of a probability from 0 to 1."""
    if probability in (0, 1):
        return math.inf if probability else -math.inf
    return math.log(probability / (1 - probability))
