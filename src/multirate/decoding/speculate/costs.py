"""Measures what a plain step, a draft step and a verification cost on this machine, and decides
whether drafting is faster. [ours]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from multirate.decoding.speculate.step_costs import StepCosts, expected_tokens
from multirate.runtime.decoder import Decoder, argmax_rows
from multirate.runtime.rows import Rows
from multirate.torch_modes import own_modes

VERIFY_ROWS = (1, 2, 4, 6, 8, 12, 16)
_MEASURE_ORDER = (
    4,
    16,
    1,
    8,
    6,
    12,
    2,
)  # most telling first: a slow model's time may not allow all of them
_CONTEXT = 32
_TOKEN_STRIDE = 7919  # a prime


@dataclass(frozen=True)
class Verdict:
    """Whether drafting is faster than plain decoding."""

    pays: bool
    """Whether it is."""
    speedup: float
    """Expected speedup at the best draft length."""
    length: int
    """The best draft length, at least 1."""
    break_even: float | None
    """The acceptance rate from which drafting is faster; None if it is not even with every token
    accepted.
    """
    message: str
    """One sentence with the numbers, for the user."""


@dataclass(frozen=True)
class CostModel:
    """Measured costs of one decoder and drafter on this machine."""

    costs: StepCosts
    longest: int = 15

    def speedup(self, acceptance: float | Sequence[float]) -> tuple[int, float]:
        """(best draft length ≥ 1, expected speedup over plain decoding) for an acceptance rate per
        token, or one rate per depth.
        """
        rates = (
            [acceptance] * self.longest
            if isinstance(acceptance, (int, float))
            else list(acceptance)
        )
        lengths = range(1, len(rates) + 1)
        speeds = {
            n: expected_tokens(rates, n) * self.costs.plain_step / self.costs.step_seconds(n)
            for n in lengths
        }
        length = max(speeds, key=speeds.__getitem__)
        return length, speeds[length]

    def verdict(self, acceptance: float | Sequence[float]) -> Verdict:
        """Whether drafts accepted at this rate (0..1 per drafted token, or one rate per depth) make
        decoding faster.
        """
        length, speedup = self.speedup(acceptance)
        break_even = self._break_even
        rate = (
            acceptance
            if isinstance(acceptance, (int, float))
            else sum(acceptance) / len(acceptance)
        )
        costs = self.costs
        numbers = (
            f"plain step {1e3 * costs.plain_step:.2f} ms, draft step "
            f"{1e3 * costs.draft_step:.2f} ms, verifying {length + 1} rows "
            f"{1e3 * costs.verify_seconds(length + 1):.2f} ms, acceptance {rate:.2f}"
        )
        if speedup > 1:
            message = (
                f"drafting is faster here: {speedup:.2f}x expected with drafts of {length} "
                f"({numbers})"
            )
        else:
            needed = (
                "no acceptance rate is high enough"
                if break_even is None
                else f"break-even at {break_even:.2f}"
            )
            message = (
                f"drafting is not faster here: {speedup:.2f}x expected ({numbers}; {needed}); "
                "decoding without drafts"
            )
        return Verdict(speedup > 1, speedup, length, break_even, message)

    @cached_property
    def _break_even(self) -> float | None:
        """Kept, as every generation asks for a verdict."""
        if self.speedup(1.0)[1] <= 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(20):  # speedup grows with acceptance
            middle = (low + high) / 2
            low, high = (low, middle) if self.speedup(middle)[1] > 1 else (middle, high)
        return high


@own_modes()
def measure_costs(
    decoder: Decoder,
    start: int = 0,
    draft_step: Callable[[], object] | None = None,
    budget_seconds: float = 0.3,
    repeats: int = 30,
) -> CostModel:
    """Times a plain step, verifications of 1..16 rows of layers [start, L) with head, and a draft
    step. Keeps the minimum times.

    draft_step: drafts one token for one sequence; None: layers [0, start) and the head on one row
    (self-speculation), or nothing for start = 0. Takes about `budget_seconds` (at least one repeat
    of three measurements); row counts left when the time is up are interpolated. Emits and keeps
    nothing.

    Assumes that all layers [start, L) verify every emitted token, so that K/V equal those of a
    prefill. Steps that emit without verification (dynamic_depth.py) have no such costs: theirs are
    None, and the engine always uses them.
    """
    info = decoder.info
    cache = decoder.new_cache(1, _CONTEXT + max(VERIFY_ROWS))
    # spread over the vocabulary: its first tokens are often ones that no text has
    places = torch.arange(1, _CONTEXT + max(VERIFY_ROWS) + 1, device=info.device)
    ids = places * _TOKEN_STRIDE % info.vocab_size
    context, tokens = Rows.causal(0, 0, _CONTEXT), ids.tolist()
    hidden = decoder.embed(ids[:_CONTEXT], context.pos)
    decoder.layers(hidden, context, 0, info.num_layers, cache)  # warms up, too
    cache.commit(0, _CONTEXT)

    def run(rows_count: int, first: int, last: int) -> None:
        rows, entering = Rows.causal(0, _CONTEXT, rows_count), tokens[:rows_count]
        if last < info.num_layers:
            x = decoder.first_layers(entering, rows, last, cache)
            argmax_rows(decoder.logits(x))
        elif first:
            decoder.next_tokens(rows, cache, x=hidden[:rows_count], start=first)
        else:
            decoder.next_tokens(rows, cache, entering)

    layers = info.num_layers
    draft = draft_step if draft_step is not None else (lambda: run(1, 0, start)) if start else None
    pieces: dict[str | int, Callable[[], object]] = {"plain": lambda: run(1, 0, layers)}
    if draft is not None:
        pieces["draft"] = draft
    essential = {*pieces, _MEASURE_ORDER[0]}
    for count in _MEASURE_ORDER:
        pieces[count] = lambda count=count: run(count, start, layers)  # type: ignore[misc]
    taken: dict[str | int, list[float]] = {name: [] for name in pieces}
    if info.device.type == "cuda":  # passes are captured, and kernels chosen, at first use
        for piece in pieces.values():
            piece()
    deadline = time.perf_counter() + budget_seconds
    for repeat in range(
        repeats + 1
    ):  # interleaved: a machine that changes its speed changes it for all
        for name, piece in pieces.items():
            late = time.perf_counter() > deadline
            if late and (repeat or name not in essential):
                continue
            begin = time.perf_counter()
            piece()
            if info.device.type == "cuda":
                torch.cuda.synchronize(info.device)
            taken[name].append(time.perf_counter() - begin)
    # the least: setting a shape up and whatever else the machine does can only add
    least = {name: min(times) for name, times in taken.items() if times}
    plain, draft_seconds = least["plain"], least.get("draft", 0.0)
    verify, cheapest = {}, math.inf
    for count in sorted(VERIFY_ROWS, reverse=True):
        if count in least:  # fewer rows do not cost more
            cheapest = min(cheapest, least[count])
            verify[count] = cheapest
    # the last drafted token has to pass the layers below `start` as well: one more draft step per
    # speculative step
    fixed = draft_seconds if start else 0.0
    return CostModel(StepCosts(plain, dict(sorted(verify.items())), draft_seconds, fixed))
