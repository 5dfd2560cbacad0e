"""Hydra's heads beside a decoder: with their torch modules, or in the decoder's own form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from multirate.methods._shared.heads import HeadsRunner
from multirate.methods.hydra.modules import HydraHeads
from multirate.runtime.captured import StaticSlots, likeliest_of, top_rows
from multirate.runtime.decoder import Decoder
from multirate.runtime.draft_branch import (
    BranchHead,
    Drafting,
    DraftWeights,
    Likeliest,
    PackedLayer,
)
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.noise import Noise
from multirate.runtime.rows import Rows
from multirate.runtime.transfer import to_device


class HydraRunner(HeadsRunner):
    """What drafting needs of the heads."""

    heads: HydraHeads

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for `prefixed`."""
        return self.heads.prefix.attn.new_cache(batch, capacity, self._captured)

    def prefixed(self, hidden: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        """Prefix layer and final norm, h_L → x: [n, d] each; writes K/V at ``rows.slot``."""
        return self._over(self._prefixed_rows, rows, cache, hidden)

    def student(self, k: int, z: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """z [n, k · d] of head k - 1 (of the first head: x) and the next tokens' embeddings [n, d]
        → z of head k, and what head k says [n, d], normed.
        """
        z = self.heads.joined(z, embedded)
        return z, self._said(k, z)

    def best(
        self,
        k: int,
        z: Tensor,
        tokens: Sequence[int],
        positions: NDArray[np.int32],
        count: int,
        noise: Sequence[Noise] | None = None,
    ) -> tuple[Tensor, Likeliest]:
        """`student` of the next tokens, and `top` of what it says."""
        decoder = self.decoder
        if noise is not None or self._captured is None:
            ids = torch.tensor(tokens, device=decoder.info.device, dtype=torch.int64)
            z, said = self.student(k, z, decoder.embed(ids, positions))
            return z, self.top(said, count, noise)
        captured, count = self._captured, min(count, decoder.info.vocab_size)

        def level(z: Tensor, numbers: Tensor) -> Tensor:
            z, said = self.student(k, z, captured.embed(*numbers.unbind(1)))
            return torch.cat([z.double(), top_rows(self.logits, count, 1.0, said)], dim=-1)

        numbers = to_device(np.stack([tokens, positions], axis=1).astype(np.int64), z.device)
        found = self._captured.alone(
            ("head", k, count), level, z, numbers, judged=partial(_without_ids, count)
        )
        return found[:, : -2 * count].to(z.dtype), likeliest_of(found[:, -2 * count :])

    def _said(self, k: int, z: Tensor) -> Tensor:
        return self.heads.student(k, z)

    def _prefixed_rows(
        self, hidden: Tensor, rows: Rows | StaticSlots, cache: KVCache | None
    ) -> Tensor:
        return self.decoder.norm(self.heads.prefix.rows(hidden, rows, cache))


class PackedHydraRunner(HydraRunner):
    """The same with `drafting`'s form of all weights."""

    def __init__(
        self, decoder: Decoder, heads: HydraHeads, drafting: Drafting, prefix: PackedLayer
    ) -> None:
        super().__init__(decoder, heads)
        self._prefix = prefix
        self._head = drafting.head(BranchHead(heads.draft_tokens))
        self._layers = [
            [drafting.linear(weight) for weight in _weights(head)] for head in heads.heads
        ]

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return self._prefix.new_cache(batch, capacity)

    def prefixed(self, hidden: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        return self.decoder.norm(self._prefix.rows(hidden, rows, cache))

    def _said(self, k: int, z: Tensor) -> Tensor:
        first, *later = self._layers[k - 1]
        d = self.decoder.info.hidden_size
        both = first(z)
        y = z[:, :d] + both[:, :d] + F.silu(both[:, d : 2 * d])
        for layer in later:
            y = y + F.silu(layer(y)[:, :d])
        return y

    def top(self, said: Tensor, count: int, noise: Sequence[Noise] | None = None) -> Likeliest:
        return self._head.top(said, count, noise=noise, normed=True)


def make_runner(decoder: Decoder, heads: HydraHeads, weights: DraftWeights) -> HydraRunner:
    """The fastest runner for `decoder`. weights: how it packs what drafts."""
    drafting = decoder.drafting(weights)
    prefix = None if drafting is None else drafting.layer(heads.prefix.description())
    if drafting is None or prefix is None:
        return HydraRunner(decoder, heads)
    return PackedHydraRunner(decoder, heads, drafting, prefix)


def _without_ids(count: int, found: Tensor) -> Tensor:
    """z and probabilities: tokens as likely may change places."""
    return torch.cat([found[:, : -2 * count], found[:, -count:]], dim=-1)


def _weights(head: Any) -> list[Tensor]:
    """Of a HydraHead's layers in order; the two maps that read z are one."""
    both = torch.cat([head.residual.weight, head.first.weight])
    return [both, *(layer.weight for layer in head.later)]
