"""A method's second residual stream laid open: what `multirate inspect` draws beside the model's
own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from multirate.runtime.kv_cache import KVCache


@dataclass(frozen=True)
class Interval:
    """The stream between one gate (or the embedding) and the next, over n tokens.

    start, gate: layers run before it and at its end. states: gate − start + 1 residuals [n, d],
    the first as it enters layer `start`. read: what the head reads at the gate, [n, d]. logits:
    what it says, float32 [n, V]. scores: by name, what the method judges a token by, [n] each.
    """

    start: int
    gate: int
    states: list[Tensor]
    read: Tensor
    logits: Tensor
    scores: Mapping[str, list[float]] = field(default_factory=dict)


class BranchTracer(ABC):
    """Runs the stream over a text that the model reads, every state true: nothing is drafted.

    gates: layers run at each of them.
    """

    gates: tuple[int, ...] = ()

    @abstractmethod
    def begin(self, cache: KVCache) -> None:
        """Another text, of one sequence, whose K/V go to `cache`."""

    @abstractmethod
    def trace(self, ids: Sequence[int], start: int, residuals: Sequence[Tensor]) -> list[Interval]:
        """The tokens ids [n] at slots start, start + 1, …, all intervals in order.

        residuals: the model's own, [n, d] entering each layer and the last one's output. Their K/V
        are in the cache already. The parts of a text are given one after the other, without gaps.
        """
