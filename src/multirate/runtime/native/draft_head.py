"""The head that drafts are read with on the native kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from multirate.runtime.draft_branch import BranchHead, Likeliest, PackedHead
from multirate.runtime.native import abi, library
from multirate.runtime.native.formats import INT16, Q4_1, Q8_0
from multirate.runtime.native.packing import Owner
from multirate.runtime.noise import Noise
from multirate.runtime.quantised import in_blocks

if TYPE_CHECKING:
    from multirate.runtime.native.decoder import NativeDecoder


class DraftHead(PackedHead):
    """A `BranchHead`, packed as `owner` packs weights. The model's own head is not copied where
    that is how the model's is, and all outputs are wanted.

    linear: its outputs, `vocab` of them. token_map: each output's token id, int64 [vocab]; None:
    the same. norm: weights of the norm before it; None: the model's. exact: the weights that
    `linear` is a quantised copy of, bf16 [vocab, d], which rescore the likeliest tokens; None: no
    rescoring.
    """

    linear: abi.CData
    exact: abi.CData | None = None
    token_map: abi.CData | None = None
    norm: abi.CData | None = None

    def __init__(self, decoder: NativeDecoder, owner: Owner, head: BranchHead) -> None:
        self._decoder, self._owner = decoder, owner
        self._tokens: list[int] | None = None
        if head.tokens is not None:
            ids = head.tokens.cpu().to(torch.int64).contiguous()
            self._tokens, self.token_map = ids.tolist(), owner.address(ids)
        self.vocab = decoder.info.vocab_size if self._tokens is None else len(self._tokens)
        if head.norm is not None:
            self.norm = owner.floats(head.norm)
        if head.weight is not None:
            self._pack(head.weight, None)
        elif head.tokens is None and (
            in_blocks(decoder.head_weight) or owner.format in (None, INT16)
        ):
            self.linear = decoder.head
        else:
            bias = decoder.head_bias
            if bias is not None and head.tokens is not None:
                bias = bias[head.tokens.cpu()]
            self._pack(decoder.head_rows(head.tokens), bias)

    def _pack(self, weight: Tensor, bias: Tensor | None) -> None:
        owner = self._owner
        if owner.format != Q4_1:
            self.linear = owner.linear(weight, bias)
        elif bias is not None:  # the exact rows would need it as well
            self.linear = replace(owner, format=Q8_0).linear(weight, bias)
        else:
            exact = weight.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
            self.linear, self.exact = owner.linear(weight), owner.address(exact)

    def top(
        self,
        x: Tensor,
        count: int,
        sharpness: float = 1.0,
        noise: Sequence[Noise] | None = None,
        normed: bool = False,
    ) -> Likeliest:
        decoder, n, count = self._decoder, len(x), min(count, self.vocab)
        if normed and decoder.logit_scale != 1.0:
            x = x * decoder.logit_scale
        x = x.contiguous()
        logits = abi.floats_for(n, self.linear.outputs)
        ids, probs = np.empty((n, count), np.int64), np.empty((n, count), np.float32)
        added = None if noise is None else abi.noise_of(noise)
        library.kernel().mr_head_top(
            decoder.workspace.address,
            self.linear,
            abi.NULL if normed else abi.at(self.norm or decoder.norm_address),
            decoder.eps,
            abi.tensor(x),
            n,
            self.vocab,
            added or abi.NULL,
            abi.at(self.token_map),
            abi.at(self.exact),
            count,
            sharpness,
            abi.tensor(logits),
            abi.longs(ids),
            abi.floats(probs),
        )
        if self._tokens is None:
            return ids.tolist(), probs.tolist()
        return [[self._tokens[i] for i in row] for row in ids.tolist()], probs.tolist()
