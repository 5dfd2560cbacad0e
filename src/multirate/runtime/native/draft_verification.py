"""Drafts of one sequence, verified in one call of the kernel: embedding, all layers, the head,
which tokens are emitted, and the accepted ones' keys and values moved into place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from multirate.errors import UserError
from multirate.runtime.decoder import VerifiedDraft
from multirate.runtime.native import abi, library
from multirate.runtime.native.cache import NativeKVCache
from multirate.runtime.noise import NOT_FINITE, Noise

MAX_NODES = abi.constant("MAX_NODES")


class DraftVerification:
    """`run` as `Decoder.verify_draft`, for drafts of at most MAX_NODES nodes. Owns all buffers of a
    step, whose memory is taken as far as drafts need it.

    stream: what the kernel embeds with, and the layers it runs; `layers`, `head`, `screen` (or
    NULL) and `norm`: how many, and what reads the last one's output. They are their maker's to keep
    alive.
    """

    def __init__(
        self,
        workspace: abi.CData,
        stream: abi.CData,
        layers: int,
        head: abi.CData,
        screen: abi.CData,
        norm: abi.CData,
    ) -> None:
        self._library, self._workspace, self._stream = library.kernel(), workspace, stream
        self._ids = np.zeros(MAX_NODES + 1, np.int64)
        self._tokens, self._parents = np.empty(MAX_NODES, np.int64), np.empty(MAX_NODES, np.int32)
        self._path = np.empty(MAX_NODES + 1, np.int32)
        self._path_at = abi.ints(self._path)
        self._logits = abi.floats_for((MAX_NODES + 1) * head.outputs)
        self._step = abi.new(
            "SpeculativeStep",
            stream=stream,
            head=head,
            screen=screen,
            norm=norm,
            ids=abi.longs(self._ids),
            tokens=abi.longs(self._tokens),
            parents=abi.ints(self._parents),
            scratch=abi.tensor(self._logits),
            layers=layers,
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
            hidden = entering.float().clone(memory_format=torch.contiguous_format)
        step.hidden = abi.tensor(hidden)
        # held until the call is over: the kernel reads it by address
        packed = None if noise is None else abi.noise_of([noise])
        step.noise = packed or abi.NULL
        best = np.empty((nodes + 1, top), np.int64)
        emitted = self._library.mr_verify_draft(
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
