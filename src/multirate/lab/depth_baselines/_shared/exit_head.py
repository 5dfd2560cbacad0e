"""The LM head at an early exit: whole, or reduced to fewer tokens.

With a vocabulary of 49,152 and a width of 576 the head reads as much memory as eight layers, so a
method that computes logits at every exit would lose more time than early exit saves. [ours]
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from multirate.methods._shared.reduced_head import spread_over
from multirate.runtime.decoder import Decoder
from multirate.runtime.draft_branch import BranchHead
from multirate.runtime.native import NativeDecoder
from multirate.runtime.native.draft_head import DraftHead
from multirate.runtime.native.formats import draft_format
from multirate.runtime.native.packing import Owner


def first_of_vocabulary(decoder: Decoder, count: int | None) -> Tensor | None:
    """The `count` tokens [count] of a reduced head that no training has chosen: the first ids,
    which a byte-pair vocabulary gives to its most frequent pieces. None, also where there are no
    more than `count`: all.
    """
    if count is None or count >= decoder.info.vocab_size:
        return None
    return torch.arange(count, device="cpu")


class ExitHead:
    """tokens: int64 [n], increasing: the tokens that an exit can choose; None: all, with the
    model's own head. The native kernel packs a reduced head in 8 bits.
    """

    def __init__(self, decoder: Decoder, tokens: Tensor | None = None) -> None:
        self._decoder = decoder
        self._tokens = None if tokens is None else tokens.to(decoder.info.device)
        self._reduced: DraftHead | None = None
        if tokens is not None and isinstance(decoder, NativeDecoder):
            self._owner = Owner(draft_format("int8"))
            self._reduced = DraftHead(decoder, self._owner, BranchHead(tokens))

    def logits(self, hidden: Tensor) -> Tensor:
        """Residuals [n, d] → float32 [n, tokens of this head]."""
        if self._reduced is not None:
            assert isinstance(self._decoder, NativeDecoder)
            head = self._reduced
            every = self._decoder.product(head.linear, hidden, self._decoder.norm_address)
            return every[:, : head.vocab]
        every = self._decoder.logits(hidden)
        return every if self._tokens is None else every[:, self._tokens]

    def widened(self, logits: Tensor) -> Tensor:
        """This head's logits as the whole vocabulary's [n, V]; −inf for tokens outside the head."""
        if self._tokens is None:
            return logits
        shape = len(logits), self._decoder.info.vocab_size
        if logits.device.type == "cpu":
            # torch would wake its threads for a row, which then starve the native kernel's
            rows = np.full(shape, -np.inf, np.float32)
            rows[:, self._tokens.numpy()] = logits.numpy()
            return torch.from_numpy(rows)
        return spread_over(self._tokens, logits, self._decoder.info.vocab_size)

    def tokens(self, places: Tensor) -> Tensor:
        """Places [...] among this head's logits → token ids [...]."""
        return places if self._tokens is None else self._tokens[places]

    def best(self, logits: Tensor, count: int) -> list[list[float]]:
        """The `count` largest probabilities of each row of this head's logits."""
        return self._decoder.likeliest(logits, count)[1]
