"""The head that a stream's output is read with on the native kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from multirate.runtime.native import NativeDecoder, abi
from multirate.runtime.native.formats import INT16, Q4_1, Q8_0
from multirate.runtime.native.packing import Owner
from multirate.runtime.noise import Noise
from multirate.runtime.quantised import in_blocks


@dataclass(frozen=True)
class DraftHead:
    """The head that reads a draft branch's output.

    token_map: each output's token id, int64 [vocab]; None: the same.
    norm: weights of the norm before it, [hidden]; None: the model's.
    tokens: the ids, [vocab], if there is a map.
    exact: the weights that ``linear`` is a quantised copy of, bf16 [vocab, hidden], which rescore
        the likeliest tokens; None: no rescoring.
    """

    linear: abi.CData
    vocab: int
    token_map: abi.CData | None = None
    norm: abi.CData | None = None
    tokens: Sequence[int] | None = None
    exact: abi.CData | None = None

    def top(
        self,
        decoder: NativeDecoder,
        x: Tensor,
        count: int,
        sharpness: float = 1.0,
        noise: Sequence[Noise] | None = None,
        normed: bool = False,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The `count` likeliest tokens by each row of x [n, d], best first, and their probabilities
        among this head's; as `NativeDecoder.top`.
        """
        ids, probs = decoder.top(
            self.linear,
            self.vocab,
            x,
            min(count, self.vocab),
            sharpness,
            noise,
            self.token_map,
            self.norm,
            normed,
            self.exact,
        )
        if self.tokens is None:
            return ids, probs
        return [[self.tokens[i] for i in row] for row in ids], probs

    @staticmethod
    def of(decoder: NativeDecoder, owner: Owner, tokens: Tensor | None = None) -> DraftHead:
        """The model's own head, or its outputs ``tokens`` [n], packed as ``owner`` packs weights
        (where that is how the model's are, and all are wanted, it is not copied).
        """
        as_it_is = in_blocks(decoder.head_weight)
        if tokens is None and (as_it_is or owner.format in (None, INT16)):
            return DraftHead(decoder.head, decoder.info.vocab_size)
        bias = decoder.head_bias
        if bias is not None and tokens is not None:
            bias = bias[tokens.cpu()]
        linear, exact = DraftHead.packed(owner, decoder.head_rows(tokens), bias)
        if tokens is None:
            return DraftHead(linear, decoder.info.vocab_size, exact=exact)
        ids = tokens.cpu().to(torch.int64).contiguous()
        return DraftHead(linear, len(ids), owner.address(ids), tokens=ids.tolist(), exact=exact)

    @staticmethod
    def own(
        owner: Owner, weight: Tensor, tokens: Tensor | None, norm: Tensor | None = None
    ) -> DraftHead:
        """A head of the draft's own, weight [vocab, hidden], over the outputs ``tokens`` (None: all
        of the model's), after its own norm [hidden] (None: the model's).
        """
        linear, exact = DraftHead.packed(owner, weight)
        ids = None if tokens is None else tokens.cpu().to(torch.int64).contiguous()
        return DraftHead(
            linear,
            len(weight),
            None if ids is None else owner.address(ids),
            None if norm is None else owner.floats(norm),
            None if ids is None else ids.tolist(),
            exact,
        )

    @staticmethod
    def packed(
        owner: Owner, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[abi.CData, abi.CData | None]:
        """A head [vocab, hidden] as ``owner`` packs weights → (`linear`, `exact`)."""
        if owner.format != Q4_1:
            return owner.linear(weight, bias), None
        if bias is not None:  # the exact rows would need it, too
            return replace(owner, format=Q8_0).linear(weight, bias), None
        exact = weight.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
        return owner.linear(weight), owner.address(exact)
