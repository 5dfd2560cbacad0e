"""A drafter that wraps another one and changes part of its behaviour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.costs import CostModel
from multirate.decoding.speculate.drafter import Draft, Drafter, DraftRequest, Verified
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache


class WrappedDrafter(Drafter):
    """Behaves as `drafter`, which must have no taps and not adapt. Raises ValueError otherwise."""

    def __init__(self, drafter: Drafter) -> None:
        if drafter.traits.taps or drafter.traits.adapts:
            raise ValueError(f"{type(drafter).__name__} decides by itself what its steps are")
        self.drafter, self.traits = drafter, drafter.traits

    def costs(self, decoder: Decoder) -> CostModel:
        return self.drafter.costs(decoder)

    def trial_step(self) -> Callable[[], object] | None:
        return self.drafter.trial_step()

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        self.drafter.begin(cache, sampler)

    def usable(self, cache: KVCache, length: int) -> int:
        return self.drafter.usable(cache, length)

    def resume(self, cache: KVCache, sampler: Sampler) -> None:
        self.drafter.resume(cache, sampler)

    def prefill(
        self,
        seqs: Sequence[int],
        prompts: Sequence[Sequence[int]],
        hidden_final: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        self.drafter.prefill(seqs, prompts, hidden_final, taps)

    def draft(self, request: DraftRequest) -> list[Draft]:
        return self.drafter.draft(request)

    def behind(self, seqs: Sequence[int]) -> int:
        return self.drafter.behind(seqs)

    def matched(self, seqs: Sequence[int]) -> list[int]:
        return self.drafter.matched(seqs)

    def accept(self, seq: int, verified: Verified) -> None:
        self.drafter.accept(seq, verified)
