"""Computes with experts that are not all in memory: the demand point of transformers' experts
modules.

The true router always decides; loading only changes what is in memory. An expert's product for
its tokens, and the sum over a token's experts, are formed in one fixed order whatever arrives
first, so logits are bit-identical for every policy, budget and predictor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multirate.errors import UserError
from multirate.experts.depth import MeasuredDepth
from multirate.experts.expert_cache import ExpertCache, Key, Slot, State
from multirate.experts.kernel import Failure, KernelExperts, knows, plans_of
from multirate.experts.loader import ExpertLoader, unreadable
from multirate.experts.memory import CudaCopies, DeviceMemory, HostMemory, SlotMemory
from multirate.experts.packed import PackedRecords, SlotExperts
from multirate.experts.policies import EvictionPolicy, eviction_policy
from multirate.experts.predictors import Predictor
from multirate.experts.prefetch_filter import PrefetchFilter
from multirate.experts.reader import Throttle
from multirate.experts.reads import NativeReads, reason
from multirate.experts.stats import ExpertStats
from multirate.experts.store import ExpertStore
from multirate.runtime.native import abi
from multirate.runtime.native.moe import ComputeExperts, KernelCall, KernelPasses, NativeMoEDecoder

IMPLEMENTATION = "multirate"


@dataclass(frozen=True)
class ExpertSettings:
    """memory_bytes: for expert weights; None: all of them. eviction: see policies.py. threads: that
    read; 0: none, the system is asked from the computing thread; None: as suits the size of an
    expert.

    disk_bytes_per_second: slows reads down to this, for measurements that repeat; None: the real
    disk. direct: past the page cache. depth: how many layers ahead experts are predicted, at most
    what the predictor can; None: as measured compute and reads have it (depth.py).
    prefetch_threshold: the least share of predictions of the same rank that must have come true
    lately for one to be read (prefetch_filter.py); 0: all are. kernel: passes are the native
    kernel's where it can (kernel.py).
    """

    memory_bytes: int | None = None
    eviction: str = "least_stale"
    disk_bytes_per_second: float | None = None
    direct: bool = True
    threads: int | None = None
    depth: int | None = None
    prefetch_threshold: float = 0.65
    kernel: bool = True


def slots_for(store: ExpertStore, memory_bytes: int | None) -> int:
    """How many experts fit. UserError below k + 1, naming the smallest budget that works."""
    record, everything = store.index.record.bytes, len(store.index.layers) * store.index.num_experts
    if memory_bytes is None:
        return everything
    count, least = memory_bytes // record, store.index.top_k + 1
    if count < least:
        raise UserError(
            f"the expert memory of {memory_bytes} bytes holds {count} experts of {record} bytes; "
            f"it must hold at least {least} (those of one token, and one to load into), so give "
            f"{least * record} bytes or more"
        )
    return min(count, everything)


class ExpertRuntime:
    """The experts of one model: slots, loader threads and the function that its experts modules
    call.

    copies: None for slots in RAM, read from disk; a GPU's copy stream for slots there, read from
    pinned RAM. Owns everything it makes; `close` ends the threads. One generation at a time.
    """

    def __init__(
        self,
        store: ExpertStore,
        settings: ExpertSettings | None = None,
        predictor: Predictor | None = None,
        eviction: EvictionPolicy | None = None,
        copies: CudaCopies | None = None,
    ) -> None:
        self.store, self.settings = store, settings or ExpertSettings()
        self._stats = ExpertStats()
        self.trace: list[tuple[int, list[int]]] | None = (
            None  # (row, experts) of each call, when recorded
        )
        count = slots_for(store, self.settings.memory_bytes)
        self._everything = len(store.index.layers) * store.index.num_experts
        self._eviction = eviction or eviction_policy(self.settings.eviction)
        self.cache = ExpertCache(count, self._eviction, self._evicted)
        throttle, direct = Throttle(self.settings.disk_bytes_per_second), self.settings.direct
        if copies is None:
            self.memory: SlotMemory = HostMemory(store, count, throttle, direct)
        else:
            self.memory = DeviceMemory(store, count, copies, throttle, direct)
        self._packed: SlotExperts | None = None
        self.note = self.memory.note
        self._kernel: KernelExperts | None = None
        self._reads = self.memory.reads(self.settings.threads)
        self.loader = ExpertLoader(store, self.cache, self._reads, self._stats, self.memory.intact)
        self.predictor: Predictor | None = None
        self._depth: MeasuredDepth | None = None
        self.predict_with(predictor)
        least = self.settings.prefetch_threshold
        self._filter = PrefetchFilter(least) if least > 0 else None
        self._token = 0
        self._last_row = len(store.index.layers)

    @property
    def stats(self) -> ExpertStats:
        """What happened since the last `reset`; of passes by the kernel a copy."""
        return self._stats if self._kernel is None else self._kernel.stats()

    @property
    def in_kernel(self) -> bool:
        """Whether the native kernel runs the passes; else Python leads them layer by layer."""
        return self._kernel is not None

    @property
    def memory_bytes(self) -> int:
        """Bytes of the slots."""
        return len(self.cache.slots) * self.store.index.record.bytes

    def predict_with(self, predictor: Predictor | None) -> None:
        """Another predictor from now on, at the depth that the last one had."""
        fixed, last = self.settings.depth, 1 if self.predictor is None else self.predictor.depth
        self.predictor, self._depth = predictor, None
        if predictor is not None:
            for one in predictor.candidates:
                one.depth = min(fixed or last, one.most_depth)
            self._depth = (
                MeasuredDepth(predictor, len(self.store.index.layers)) if fixed is None else None
            )
        if self._kernel is not None:
            plans = plans_of(predictor, self.settings.prefetch_threshold)
            if plans is None:
                self._leave_kernel()
            else:
                self._kernel.predict_with(plans)

    def kernel(self, decoder: NativeMoEDecoder) -> KernelPasses | None:
        """Runs passes of `decoder` from now on; None where Python has to (kernel.py), or has begun
        to.
        """
        untouched = not self.cache.occupied or self._token == 0  # but for `preload`
        if self._kernel is None and self.settings.kernel and untouched and self.trace is None:
            plans = plans_of(self.predictor, self.settings.prefetch_threshold)
            if plans is not None and knows(self._eviction) and isinstance(self._reads, NativeReads):
                loaded = self.cache.occupied
                self._kernel = KernelExperts(
                    decoder, self.store, self._in_slots, self._reads, self._eviction, plans
                )
                if loaded:
                    fresh = eviction_policy(self.settings.eviction)
                    self.cache = ExpertCache(len(self.cache.slots), fresh, self._evicted)
                    self.loader = ExpertLoader(
                        self.store, self.cache, self._reads, self._stats, self.memory.intact
                    )
                    self._running(lambda kernel: kernel.load(loaded))
        return self._pass if self._kernel is not None and self.trace is None else None

    def expert(self, row: int, slot: int) -> abi.CData:
        """As ExpertProvider."""
        return self._in_slots.expert(row, slot)

    @property
    def _in_slots(self) -> SlotExperts:
        if self._packed is None:
            record = self.store.index.record
            assert isinstance(record, PackedRecords)  # else the kernel does not run the model
            self._packed = record.experts(self.memory.slots)
        return self._packed

    def _pass(
        self, call: KernelCall, start: int, stop: int, into: int, row: int, rows: int
    ) -> None:
        """As KernelPasses."""
        assert self._kernel is not None
        controls = self._kernel.controls
        if (
            self.predictor is not None and len(self.cache.slots) < self._everything
        ):  # else nothing is ever predicted
            if row <= controls.last_row:
                self._new_pass(rows)
            controls.depth, controls.predictor = self.predictor.depth, self.predictor.candidate
            controls.active = self.predictor.on
        self._running(lambda kernel: kernel.run(call, start, stop, into))

    def _running(self, work: Callable[[KernelExperts], None]) -> None:
        assert self._kernel is not None
        try:
            work(self._kernel)
        except Failure as failed:
            raise unreadable(
                self.store, (failed.row, failed.expert), reason(failed.error)
            ) from None

    def _leave_kernel(self) -> None:
        """Python goes on with no expert in memory: of what the kernel loads it knows nothing."""
        assert self._kernel is not None
        self._stats = self._kernel.stats()
        self.loader.close()
        self._kernel.close()
        self._kernel = None
        self._reads = self.memory.reads(self.settings.threads)
        self.loader = ExpertLoader(
            self.store, self.cache, self._reads, self._stats, self.memory.intact
        )

    def run(
        self,
        row: int,
        needed: list[int],
        compute: ComputeExperts,
        residual: Tensor,
        routing: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Hands every expert in `needed` to `compute` once, those that are there first.

        row: of the store. Records are unchanged until compute returns. residual [N, d]: the stream
        after this layer's attention, and routing: the router's choice [N, k] with weights [N, k],
        for predictors.
        """
        if self._kernel is not None:
            self._leave_kernel()
        self._enter(row, len(residual))
        if self.trace is not None:
            self.trace.append((row, needed))
        waiting = self._ask(row, needed)
        if self.predictor is not None:
            self.predictor.used(row, needed)
            if self._filter is not None:
                self._filter.outcome(row, needed)
            if self.cache.occupied < self._everything:
                if routing is not None:
                    self.predictor.routed(*routing)
                self._predict(row, residual)
        try:
            while waiting:
                slots = self._next(row, waiting)
                began = time.perf_counter()
                try:
                    keys = [
                        slot.key for slot in slots if slot.key is not None
                    ]  # a held slot has one
                    pairs = zip(keys, slots, strict=True)
                    compute([(key[1], slot.index) for key, slot in pairs])
                finally:
                    self.memory.used(slot.index for slot in slots)
                    self.cache.release(slots)
                waiting = [key for key in waiting if key not in keys]
                self.loader.demand(waiting)  # slots have become free: for these first
                self.loader.go_on()
                self._stats.note("compute", began, row, keys[0][1] if len(keys) == 1 else -1)
        finally:
            self.cache.pin(())

    def forward(
        self,
        module: Any,
        row: int,
        hidden: Tensor,
        top_index: Tensor,
        top_weights: Tensor,
        residual: Tensor,
    ) -> Tensor:
        """hidden [N, H], top_index [N, k] experts, top_weights [N, k] → [N, H], as the experts
        module's own forward.
        """
        n, k = top_index.shape
        flat = top_index.reshape(-1)
        parts = torch.empty(n * k, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        record = self.store.index.record

        def compute(found: Sequence[tuple[int, int]]) -> None:
            for expert, slot in found:
                places = (flat == expert).nonzero()[:, 0]
                own = record.tensors(row, self.memory.slots[slot])
                # in autocast products have its dtype
                parts[places] = expert_forward(module, own, hidden[places // k]).to(parts.dtype)

        self.run(
            row, torch.unique(flat).tolist(), compute, residual, (top_index, top_weights.float())
        )
        weighted = parts.view(n, k, -1).float() * top_weights[..., None].float()
        total: Tensor = weighted.sum(dim=1).to(
            hidden.dtype
        )  # over a token's k in the router's order, always
        return total

    def preload(self) -> None:
        """Reads every expert, as far as the slots go."""
        if self._kernel is not None:
            self._running(lambda kernel: kernel.load(len(self.cache.slots)))
            return
        for number in range(len(self.cache.slots)):
            key = divmod(number, self.store.index.num_experts)
            self.loader.demand([key])
            self.cache.release([self.loader.wait([key])])

    def reset(self, events: bool = False) -> None:
        """Statistics from zero; events: record a timeline."""
        self._stats.__dict__.update(ExpertStats(events=[] if events else None).__dict__)
        if self._kernel is not None:
            self._kernel.reset(events)

    def close(self) -> None:
        """Ends the reader threads; the model cannot be run with this runtime any more."""
        self.loader.close()
        self.memory.close()
        if self._kernel is not None:
            self._kernel.close()

    def __enter__(self) -> ExpertRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- a call ------------------------------------------------------------------------------------

    def _enter(self, row: int, rows: int) -> None:
        if row <= self._last_row:
            self._token += 1
            self._new_pass(rows)
            if self._filter is not None:
                self._filter.new_pass()
            self._stats.note("token", time.perf_counter(), row)
        self._last_row = row
        self.loader.pass_row(self._token, row)

    def _new_pass(self, rows: int) -> None:
        if self._depth is not None:
            self._depth.new_pass(lambda: self.stats, rows)
        if self.predictor is not None:
            self.predictor.began(rows)

    def _ask(self, row: int, needed: list[int]) -> list[Key]:
        keys = [(row, expert) for expert in needed]
        self._stats.calls += 1
        self._stats.uses += len(keys)
        self.loader.forget_failures()
        self.cache.pin(keys)
        missing = []
        for key in keys:
            slot = self.cache.find(key)
            if slot is None or slot.state is not State.READY:
                missing.append(key)
                continue
            self._stats.hits += 1
            self._stats.timely += slot.fresh
            self.cache.touch(slot)
        if missing:
            self.loader.demand(missing)
        return keys

    def _predict(self, row: int, residual: Tensor) -> None:
        assert self.predictor is not None
        began = time.perf_counter()
        found = self.predictor.predict(row, residual)
        self._stats.predictor_seconds += time.perf_counter() - began
        self._stats.note("predict", began, row)
        if self._filter is not None:
            keep = self._filter.keep
            found = [
                one
                for one in found
                if self.cache.find(one.key) is not None
                or keep(one.key, one.deadline - row, one.chance)
            ]
        if found:
            self.loader.prefetch(found)

    def _next(self, row: int, keys: list[Key]) -> list[Slot]:
        """Holds those of `keys` that are READY, or waits for one."""
        self.loader.poll()
        found = [slot for key in keys if (slot := self.cache.hold(key)) is not None]
        if found:
            return found
        began = time.perf_counter()
        slot = self.loader.wait(keys)
        self._stats.stall_seconds += time.perf_counter() - began
        self._stats.note("stall", began, row)
        return [slot]

    def _evicted(self, slot: Slot) -> None:
        self._stats.wasted += slot.fresh


def expert_forward(module: Any, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """One expert on its tokens x [n, H] → [n, H]; weights: the slices of the module's parameters
    for that expert.
    """
    up = _linear(x, weights["gate_up_proj"], weights.get("gate_up_proj_bias"), module.is_transposed)
    inner = module._apply_gate(up)
    out = _linear(inner, weights["down_proj"], weights.get("down_proj_bias"), module.is_transposed)
    return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return nn.functional.linear(x, weight.T if transposed else weight, bias)
