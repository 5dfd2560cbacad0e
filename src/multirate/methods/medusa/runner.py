"""Medusa's heads beside a decoder: with their torch modules on any, packed on the native one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from multirate.methods.common.config import DraftWeights
from multirate.methods.common.draft_head import DraftHead
from multirate.methods.common.heads_drafter import likeliest
from multirate.methods.medusa.modules import MedusaHeads
from multirate.model.decoder import Decoder
from multirate.model.native import NativeDecoder
from multirate.model.native.packing import Owner, draft_layout
from multirate.model.noise import Noise


class MedusaRunner:
    """What drafting needs of the heads."""

    def __init__(self, decoder: Decoder, heads: MedusaHeads) -> None:
        self.decoder, self.heads = decoder, heads

    def students(self, x: Tensor, count: int) -> Tensor:
        """x [n, d], normed → what the first `count` heads say, head after head [count · n, d],
        normed.
        """
        return self.heads(x, count).flatten(0, 1)

    def top(
        self, students: Tensor, count: int, noise: Sequence[Noise] | None = None
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The `count` likeliest tokens by each of the students [n, d] and their probabilities, best
        first. noise[i]: added to the logits of row i.
        """
        return likeliest(self.decoder, students, count, noise, self.heads.draft_tokens)


class NativeMedusaRunner(MedusaRunner):
    """The same with packed copies of all weights; the heads' maps are one product. weights: how
    they are packed.
    """

    decoder: NativeDecoder

    @staticmethod
    def where_supported(
        decoder: Decoder, heads: MedusaHeads, weights: DraftWeights
    ) -> MedusaRunner:
        """This runner on a decoder that it supports, else the one for any decoder."""
        if isinstance(decoder, NativeDecoder) and decoder.supports_fused:
            return NativeMedusaRunner(decoder, heads, weights)
        return MedusaRunner(decoder, heads)

    def __init__(self, decoder: NativeDecoder, heads: MedusaHeads, weights: DraftWeights) -> None:
        super().__init__(decoder, heads)
        owner = self._owner = Owner(draft_layout(weights))
        self._head = DraftHead.of(decoder, owner, heads.draft_tokens)
        self._maps = owner.linear(torch.cat([*heads.heads.parameters()]))

    def students(self, x: Tensor, count: int) -> Tensor:
        n, d = x.shape
        mapped = self.decoder.product(self._maps, x, None)[:, : count * d].view(n, count, d)
        return (x[:, None] + F.silu(mapped)).transpose(0, 1).flatten(0, 1)

    def top(
        self, students: Tensor, count: int, noise: Sequence[Noise] | None = None
    ) -> tuple[list[list[int]], list[list[float]]]:
        return self._head.top(self.decoder, students, count, noise=noise, normed=True)
