"""Medusa's heads beside a decoder: with their torch modules, or in the decoder's own form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from multirate.methods._shared.heads import HeadsRunner
from multirate.methods.medusa.modules import MedusaHeads
from multirate.runtime.captured import likeliest_of, top_rows
from multirate.runtime.decoder import Decoder
from multirate.runtime.draft_branch import BranchHead, Drafting, DraftWeights, Likeliest
from multirate.runtime.noise import Noise


class MedusaRunner(HeadsRunner):
    """What drafting needs of the heads."""

    heads: MedusaHeads

    def students(self, hidden: Tensor, count: int) -> Tensor:
        """h_L [n, d] → what the first `count` heads say, head after head [count · n, d], normed."""
        said = self._alone(("students", count), partial(self._of_rows, count), hidden)
        return said.transpose(0, 1).flatten(0, 1)

    def best(
        self, hidden: Tensor, heads: int, count: int, noise: Sequence[Noise] | None = None
    ) -> Likeliest:
        """`top` of what the first `heads` heads say of h_L [n, d], head after head."""
        if noise is not None or self._captured is None:
            return self.top(self.students(hidden, heads), count, noise)
        count = min(count, self.decoder.info.vocab_size)

        def found(hidden: Tensor) -> Tensor:
            said = self._of_rows(heads, hidden).flatten(0, 1)
            return top_rows(self.logits, count, 1.0, said).view(len(hidden), heads, 2 * count)

        rows = self._captured.alone(
            ("best", heads, count), found, hidden, judged=lambda out: out.chunk(2, -1)[1]
        )
        return likeliest_of(rows.transpose(0, 1).flatten(0, 1))

    def _of_rows(self, count: int, hidden: Tensor) -> Tensor:
        """The same row after row [n, count, d]: of rows is what a capture pads and cuts."""
        return self.heads(self.decoder.norm(hidden), count).transpose(0, 1)


class PackedMedusaRunner(MedusaRunner):
    """The same with `drafting`'s form of all weights; the heads' maps are one product."""

    def __init__(self, decoder: Decoder, heads: MedusaHeads, drafting: Drafting) -> None:
        super().__init__(decoder, heads)
        self._head = drafting.head(BranchHead(heads.draft_tokens))
        self._maps = drafting.linear(torch.cat([*heads.heads.parameters()]))

    def students(self, hidden: Tensor, count: int) -> Tensor:
        x = self.decoder.norm(hidden)
        n, d = x.shape
        mapped = self._maps(x)[:, : count * d].view(n, count, d)
        return (x[:, None] + F.silu(mapped)).transpose(0, 1).flatten(0, 1)

    def top(self, said: Tensor, count: int, noise: Sequence[Noise] | None = None) -> Likeliest:
        return self._head.top(said, count, noise=noise, normed=True)


def make_runner(decoder: Decoder, heads: MedusaHeads, weights: DraftWeights) -> MedusaRunner:
    """The fastest runner for `decoder`. weights: how it packs what drafts."""
    drafting = decoder.drafting(weights)
    if drafting is None:
        return MedusaRunner(decoder, heads)
    return PackedMedusaRunner(decoder, heads, drafting)
