"""Drafts of one sequence, verified in one call of the kernel: embedding, all layers, the head,
which tokens are emitted, and the accepted ones' keys and values moved into place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from multirate.errors import UserError
from multirate.runtime.decoder import VerifiedDraft
from multirate.runtime.native import abi, library
from multirate.runtime.native.cache import NativeKVCache
from multirate.runtime.noise import NOT_FINITE, Noise

if TYPE_CHECKING:
    from multirate.runtime.native.decoder import NativeDecoder

MAX_NODES = abi.constant("MAX_NODES")


class DraftVerification:
    """`run` as `Decoder.verify_draft`, for drafts of at most MAX_NODES nodes. Owns all buffers of a
    step, whose memory is taken as far as drafts need it.
    """

    def __init__(self, decoder: NativeDecoder) -> None:
        self._workspace, self._stream = decoder.workspace.address, decoder.branch()
        self._ids = np.zeros(MAX_NODES + 1, np.int64)
        self._tokens, self._parents = np.empty(MAX_NODES, np.int64), np.empty(MAX_NODES, np.int32)
        self._path = np.empty(MAX_NODES + 1, np.int32)
        self._path_at = abi.ints(self._path)
        self._logits = abi.floats_for((MAX_NODES + 1) * decoder.head.outputs)
        self._step = abi.new(
            "SpeculativeStep",
            branch=self._stream,
            head=decoder.head,
            screen=decoder.screen,
            norm=decoder.norm_address,
            ids=abi.longs(self._ids),
            tokens=abi.longs(self._tokens),
            parents=abi.ints(self._parents),
            scratch=abi.tensor(self._logits),
            layers=decoder.info.num_layers,
        )

    def run(
        self,
        cache: NativeKVCache,
        seq: int,
        ids: Sequence[int],
        parents: Sequence[int],
        noise: Noise | None,
        top: int,
        entering: Tensor | None,
        start: int,
    ) -> VerifiedDraft:
        """See `Decoder.verify_draft`."""
        step, nodes, length = self._step, len(parents), cache.lengths[seq]
        cache.make_room_to(length + nodes)
        step.caches, step.capacity, step.sequence = cache.address, cache.capacity, seq
        step.length = length
        self._ids[0] = ids[0]
        self._tokens[:nodes], self._parents[:nodes] = ids[1:], parents
        if entering is None:
            start, hidden = 0, abi.floats_for(nodes + 1, self._stream.shape.hidden)
        else:
            hidden = abi.copied(entering)
        step.hidden = abi.tensor(hidden)
        # held until the call is over: the kernel reads it by address
        packed = None if noise is None else abi.noise_of([noise])
        step.noise = packed or abi.NULL
        best = np.empty((nodes + 1, top), np.int64)
        emitted = library.kernel().mr_verify_draft(
            self._workspace, step, nodes, start, top, abi.longs(best), self._path_at
        )
        if emitted < 0:
            raise UserError(NOT_FINITE)
        return VerifiedDraft(
            self._path[:emitted].tolist(),
            self._ids[:emitted].tolist(),
            hidden,
            best.tolist() if top else None,
        )
