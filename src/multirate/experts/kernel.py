"""Passes over a mixture's layers in one kernel call each: slots, loads and predictions without the
interpreter.

The kernel's own state machine (csrc/moe/) does what expert_cache.py, policies.py, loader.py,
predictors.py and prefetch_filter.py do for decoders that Python runs; tests/experts/test_kernel.py
holds the two together. It knows reads by the kernel, the named eviction policies, Belady's, and the
predictors of `plan_of`; runtime.py keeps to Python for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from multirate.experts.accelerated import AcceleratedResidual, AcceleratedWithAttention
from multirate.experts.packed import SlotExperts
from multirate.experts.policies import (
    Belady,
    DecayedFrequency,
    EvictionPolicy,
    KeepNothing,
    LeastRecentlyUsed,
    LeastStale,
)
from multirate.experts.predictors import NextLayerGate, Oracle, Popularity, Predictor, PreviousToken
from multirate.experts.reads import NativeReads
from multirate.experts.stats import Event, ExpertStats
from multirate.experts.store import ExpertStore
from multirate.runtime.native import abi, library
from multirate.runtime.native import expert_cache as c
from multirate.runtime.native.accelerated_residual import NativeAcceleratedResidual
from multirate.runtime.native.moe import KernelCall, KernelMixture, NativeMoEDecoder

_EVICTIONS: dict[type[EvictionPolicy], str] = {
    KeepNothing: "none",
    LeastRecentlyUsed: "lru",
    DecayedFrequency: "lrfu",
    LeastStale: "least_stale",
    Belady: "belady",
}

_COUNTS = [name for name, _ in abi.ffi.typeof("Counts").fields]


class Failure(Exception):
    """A read failed: the row of its layer, the expert, the errno."""

    def __init__(self, row: int, expert: int, error: int) -> None:
        super().__init__(row, expert, error)
        self.row, self.expert, self.error = row, expert, error


class _Memory:
    """Keeps alive what C structures point to."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def array(self, values: Sequence[int] | np.ndarray, dtype: Any = np.int32) -> abi.CData:
        """Address of a copy that lives as long as this."""
        kept = np.ascontiguousarray(values, dtype=dtype)
        self.kept.append(kept)
        return abi.at(kept.ctypes.data)

    def shared(self, values: bytearray) -> abi.CData:
        """Address of these bytes themselves, which the kernel may write."""
        view = np.frombuffer(values, np.uint8)
        self.kept.append(view)
        return abi.at(view.ctypes.data)

    def pointers(self, addresses: Sequence[int]) -> abi.CData:
        """Address of an array of addresses."""
        return self.array(addresses, np.uintp)


class _Plan(_Memory):
    """A PredictorPlan and the memory that it points to."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.plan = abi.new("PredictorPlan", kind=0, threshold=threshold)


def plans_of(predictor: Predictor | None, threshold: float) -> list[_Plan] | None:
    """The kernel's form of a predictor, or of each that it chooses from; None: there is none of
    some.
    """
    candidates: Sequence[Predictor | None] = [None] if predictor is None else predictor.candidates
    plans = [plan_of(one, threshold) for one in candidates]
    known = [plan for plan in plans if plan is not None]
    return known if len(known) == len(plans) <= c.MOST_PREDICTORS else None


def plan_of(predictor: Predictor | None, threshold: float) -> _Plan | None:
    """The kernel's form of one predictor; None: it has none."""
    made = _Plan(threshold)
    plan = made.plan
    if predictor is None:
        return made
    plan.most_depth = min(predictor.most_depth, c.MOST_AHEAD)
    kind = type(predictor)
    if kind is PreviousToken:
        plan.kind = c.PREDICTORS.index("previous_token")
    elif isinstance(predictor, Popularity) and kind is Popularity:
        plan.kind, plan.count = c.PREDICTORS.index("popularity"), predictor.count
    elif kind is NextLayerGate:
        plan.kind = c.PREDICTORS.index("next_layer_gate")
    elif isinstance(predictor, AcceleratedResidual) and isinstance(
        predictor.native, NativeAcceleratedResidual
    ):
        plan.kind = c.PREDICTORS.index("accelerated")
        native = predictor.native
        made.kept.append(native)
        plan.most_depth = min(plan.most_depth, native.most_depth)
        plan.sites = made.pointers(native.sites(plan.most_depth))
        pairs = native.pairs(plan.most_depth)
        plan.pairs = made.pointers(pairs) if pairs else abi.NULL
        plan.layer_of, plan.ones, plan.eps = (
            made.array(predictor.layers),
            native.ones,
            native.eps,
        )
    elif isinstance(predictor, AcceleratedWithAttention):
        plan.kind = c.PREDICTORS.index("stream")
        made.kept.append(predictor.native)
        plan.pruned, plan.layer_of = predictor.native.layers, made.array(predictor.layers)
        plan.ones, plan.eps = predictor.native.ones, predictor.native.eps
    elif isinstance(predictor, Oracle) and kind is Oracle:
        plan.kind = c.PREDICTORS.index("oracle")
        plan.trace = made.array([expert for _, experts in predictor.trace for expert in experts])
        plan.trace_ends = made.array(np.cumsum([len(experts) for _, experts in predictor.trace]))
        plan.trace_rows, plan.trace_calls = (
            made.array([row for row, _ in predictor.trace]),
            len(predictor.trace),
        )
    else:
        return None
    return made


def knows(eviction: EvictionPolicy) -> bool:
    """Whether the kernel has this policy."""
    return type(eviction) in _EVICTIONS


class KernelExperts:
    """The experts of one runtime for one native decoder. reads fill `slots`, and outlive it.

    Raises MemoryError. One pass at a time.
    """

    def __init__(
        self,
        decoder: NativeMoEDecoder,
        store: ExpertStore,
        slots: SlotExperts,
        reads: NativeReads,
        eviction: EvictionPolicy,
        plans: Sequence[_Plan],
    ) -> None:
        self._decoder, self._library = decoder, library.kernel()
        index = store.index
        rows, experts = len(index.layers), index.num_experts
        self._experts = experts
        self._kept = _Memory()
        plan = abi.new(
            "ExpertCachePlan", rows=rows, experts=experts, slots=len(slots), reads=reads.handle
        )
        plan.policy = c.EVICTIONS.index(_EVICTIONS[type(eviction)])
        plan.offsets = self._kept.array(
            [store.offset(r, e) for r in range(rows) for e in range(experts)], np.int64
        )
        plan.checksums = self._kept.array(index.checksums, np.uint32)
        plan.checked = self._kept.shared(store.checked)
        if isinstance(eviction, DecayedFrequency):
            plan.loss = eviction.loss
        if isinstance(eviction, Belady):
            uses: list[list[int]] = [[] for _ in range(rows * experts)]
            for at, (row, expert) in enumerate(eviction.trace):
                uses[row * experts + expert].append(at)
            plan.future = self._kept.array([at for one in uses for at in one])
            plan.future_ends = self._kept.array(np.cumsum([len(one) for one in uses]))
        self._handle: abi.CData | None = self._library.mr_expert_cache_open(plan)
        if not self._handle:
            raise MemoryError("not enough memory for the experts' tables")
        self.controls = self._library.mr_expert_cache_controls(self._handle)
        self._mixture = KernelMixture(decoder, slots.by_row)
        self.predict_with(plans)

    def predict_with(self, plans: Sequence[_Plan]) -> None:
        """Other predictors from now on, of which controls.predictor chooses."""
        self._plans = plans
        packed = abi.array("PredictorPlan", [one.plan for one in plans])
        if not self._library.mr_expert_cache_predict(self._handle, packed, len(packed)):
            raise MemoryError("not enough memory for the predictor's tables")

    def run(self, call: KernelCall, start: int, stop: int, into: abi.CData) -> None:
        """Layers [start, stop), `into`: mr_mixture's last argument. Raises Failure; Ctrl-C is heard
        while a read takes long.
        """
        work, mixture, handle = self._decoder.workspace.address, self._mixture.packed, self._handle
        self.controls.paused_layer = -1  # of a pass that was given up
        while (
            state := self._library.mr_mixture(work, mixture, handle, *call, start, stop, into)
        ) == c.PAUSED:
            start = self.controls.paused_layer
        self._check(state)

    def load(self, count: int) -> None:
        """The first `count` experts, layer by layer, into memory. Raises as `run`."""
        keys = np.arange(count, dtype=np.int32)
        while (
            state := self._library.mr_expert_cache_load(self._handle, abi.ints(keys), count)
        ) == c.PAUSED:
            pass
        self._check(state)

    def stats(self) -> ExpertStats:
        """The counts, and events where they are recorded, as they are now."""
        counts, controls = self.controls.counts, self.controls
        events = None
        if controls.record:
            found = (controls.events[i] for i in range(controls.event_count))
            events = [Event(c.EVENTS[e.kind], e.begin, e.end, e.row, e.expert) for e in found]
        return ExpertStats(**{name: getattr(counts, name) for name in _COUNTS}, events=events)

    def reset(self, events: bool) -> None:
        """Counts from zero; events: record them."""
        counts = self.controls.counts
        abi.ffi.memmove(
            abi.ffi.addressof(counts), bytes(abi.ffi.sizeof(counts)), abi.ffi.sizeof(counts)
        )
        self.controls.event_count, self.controls.record = 0, int(events)

    def close(self) -> None:
        """Frees the tables; reads under way still write into the slots."""
        if self._handle is not None:
            self._library.mr_expert_cache_close(self._handle)
            self._handle = None

    def _check(self, state: int) -> None:
        if state == c.DONE:
            return
        if state == c.READ_FAILED:
            row, expert = divmod(self.controls.failed_key, self._experts)
            raise Failure(row, expert, self.controls.failure)
        raise RuntimeError(
            "every slot is held and nothing is being read"
        )  # a defect, never the user's
