"""Medusa as a drafter: all heads read the last verified row's final residual; their best tokens
span a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.drafter import Draft, DraftRequest, Traits, Verified
from multirate.errors import UserError
from multirate.methods._shared.heads import HeadsDrafter
from multirate.methods.medusa.config import WIDTHS, MedusaDecodeConfig, nodes_of
from multirate.methods.medusa.modules import MedusaHeads
from multirate.methods.medusa.runner import make_runner
from multirate.runtime.decoder import Decoder
from multirate.runtime.draft_branch import Likeliest
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.noise import Noise


class MedusaDrafter(HeadsDrafter):
    """Depth k of the tree holds head k's `widths[k - 1]` best tokens below every node of depth k -
    1.
    """

    def __init__(self, decoder: Decoder, heads: MedusaHeads, config: MedusaDecodeConfig) -> None:
        super().__init__(decoder)
        self.runner = make_runner(decoder, heads.to(self.row.dtype), config.weights)
        self.widths = config.widths or WIDTHS[: heads.config.heads]
        if len(self.widths) > heads.config.heads:
            raise UserError(
                f"medusa's widths are {list(self.widths)}, but this accelerator has heads for "
                f"only {heads.config.heads} depths"
            )
        self.traits = Traits(max_nodes=nodes_of(self.widths))
        self._last: dict[int, Tensor] = {}  # h_L [1, d] of each sequence's last verified row

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        self._last = {}

    def usable(self, cache: KVCache, length: int) -> int:
        return length  # the row that is read again brings all it needs

    def prefill(
        self,
        seqs: Sequence[int],
        prompts: Sequence[Sequence[int]],
        hidden_final: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        for b, hidden in zip(seqs, hidden_final, strict=True):
            self._last[b] = hidden[-1:]

    def draft(self, request: DraftRequest) -> list[Draft]:
        seqs = request.seqs
        if not max(request.limits):
            return [Draft([], []) for _ in seqs]
        hidden = torch.cat([self._last[b] for b in seqs])
        places = [(b, ahead) for ahead in range(len(self.widths)) for b in seqs]
        noise = self.noise(request.sampler, places)
        best, _ = self._best(hidden, noise)
        return [self._tree(best[i :: len(seqs)]) for i in range(len(seqs))]

    def accept(self, seq: int, verified: Verified) -> None:
        self._last[seq] = verified.accepted[-1:]

    def trial_step(self) -> Callable[[], object]:
        """All heads at once: dearer than one more depth, as it is paid whole from the first."""
        return lambda: self._best(self.row)

    @torch.no_grad()
    def _best(self, hidden: Tensor, noise: list[Noise] | None = None) -> Likeliest:
        """h_L [n, d] → each head's best tokens after each row, head after head."""
        return self.runner.best(hidden, len(self.widths), max(self.widths), noise)

    def _tree(self, best: Sequence[Sequence[int]]) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        level = [0]
        for width, ranked in zip(self.widths, best, strict=True):
            below = [(parent, token) for parent in level for token in ranked[:width]]
            level = [len(tokens) + i for i in range(1, len(below) + 1)]
            parents += [parent for parent, _ in below]
            tokens += [token for _, token in below]
        return Draft(tokens, parents)
