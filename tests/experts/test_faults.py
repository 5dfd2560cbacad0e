"""Reads that fail, end early, come late or in another order: a clear error or the same tokens, never a hang."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import multirate.experts.loader as loading
from multirate.errors import UserError
from multirate.experts.model import OffloadedExperts, load_without_experts
from multirate.experts.pack import pack
from multirate.experts.policies import Belady, eviction_policy
from multirate.experts.predictors import Oracle, Shuffled
from multirate.experts.reader import Arena, RecordReader, Throttle
from multirate.experts.runtime import ExpertRuntime, ExpertSettings
from multirate.experts.slot_cache import SlotCache, State
from multirate.experts.store import ExpertStore

from .tiny import EXPERTS, TOP_K, save

IDS = torch.tensor([[5, 9, 2, 44, 17, 30, 8, 8, 21, 3, 50]])


@pytest.fixture(scope="module")
def offload(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OffloadedExperts]:
    folder = tmp_path_factory.mktemp("olmoe")
    save("olmoe", folder)
    pack(folder, folder / "experts")
    made = OffloadedExperts(load_without_experts(folder), ExpertStore.open(folder / "experts"))
    yield made
    made.remove()


def settings(offload: OffloadedExperts, slots: int, **more: Any) -> ExpertSettings:
    return ExpertSettings(slots * offload.store.index.record.bytes, **more)


def steps(offload: OffloadedExperts) -> torch.Tensor:
    """Token by token, as decoding does."""
    cache, pieces = None, []
    with torch.no_grad():
        for at in range(IDS.shape[1]):
            out = offload.model(IDS[:, at : at + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            pieces.append(out.logits)
    return torch.cat(pieces, 1)


def test_a_failed_read_is_an_error_that_names_the_expert(offload: OffloadedExperts) -> None:
    runtime = offload.use(settings(offload, 4, eviction="lru"))
    read, calls = runtime.memory.reader.read, []

    def failing(offset: int, into: memoryview) -> None:
        calls.append(offset)
        if len(calls) == 7:
            raise OSError(5, "Input/output error")
        read(offset, into)

    runtime.memory.reader.read = failing  # type: ignore
    with pytest.raises(UserError, match=r"expert \d+ of layer \d could not be read from .*Input/output error"):
        steps(offload)
    assert runtime.stats.errors == 1
    right = steps(offload)  # the disk is back: nothing is left half-read
    offload.use()
    assert torch.equal(right, steps(offload))


def test_a_disk_that_goes_away(offload: OffloadedExperts) -> None:
    runtime = offload.use(settings(offload, 3, eviction="none"))
    steps(offload)
    os.close(runtime.memory.reader._fd)
    runtime.memory.reader._fd = os.open(os.devnull, os.O_RDONLY)  # every read ends at once
    with pytest.raises(UserError, match="truncated while in use"):
        steps(offload)


def test_failed_speculation_is_no_error(offload: OffloadedExperts) -> None:
    offload.use()
    right = steps(offload)
    runtime = offload.use(settings(offload, 7), "previous_token")
    load_read, mine = runtime.memory.reader.read, threading.local()

    def failing(offset: int, into: memoryview) -> None:
        number = offset // offload.store.index.record.bytes
        load = runtime.loader._loads.get(divmod(number, EXPERTS))
        if load is not None and not load.demanded:
            mine.failed = True
            raise OSError(5, "Input/output error")
        load_read(offset, into)

    runtime.memory.reader.read = failing  # type: ignore
    assert torch.equal(steps(offload), right)


def test_late_and_short_reads(offload: OffloadedExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    offload.use()
    right = steps(offload)
    monkeypatch.setattr(loading, "CHUNK", 4096)  # several chunks a record, so that reads are preempted
    for threads in (1, 2):
        runtime = offload.use(settings(offload, 5, threads=threads), "next_layer_gate")
        read = runtime.memory.reader.read

        def slow(offset: int, into: memoryview, read: Any = read) -> None:
            time.sleep(0.0007 * (offset // 4096 % 3))
            read(offset, into)

        runtime.memory.reader.read = slow  # type: ignore
        assert torch.equal(steps(offload), right)
        assert runtime.stats.speculative_bytes > 0


def test_a_short_read_is_gone_on_with(offload: OffloadedExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = RecordReader(offload.store.path)
    arena = Arena(1, offload.store.index.record.bytes)
    whole = offload.store.path.read_bytes()
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:4096]], at))
    for key in ((0, 0), (2, 5)):
        at = offload.store.offset(*key)
        reader.read(at, arena.buffers[0])
        assert bytes(arena.buffers[0]) == whole[at : at + len(arena.buffers[0])]
    reader.close()


def test_without_direct_reads_the_bytes_are_the_same_and_it_is_said(offload: OffloadedExperts) -> None:
    offload.use()
    right = steps(offload)
    runtime = offload.use(settings(offload, 4, direct=False))
    assert (runtime.note and "page cache" in runtime.note) or runtime.note == "O_DIRECT was switched off"
    assert torch.equal(steps(offload), right)


def test_budgets(offload: OffloadedExperts) -> None:
    record = offload.store.index.record.bytes
    with pytest.raises(UserError, match=f"at least 3 .*{3 * record} bytes"):
        ExpertRuntime(offload.store, ExpertSettings(3 * record - 1))
    with ExpertRuntime(offload.store, ExpertSettings(1 << 40)) as runtime:
        assert len(runtime.cache.slots) == 3 * EXPERTS


def test_bytes_are_what_the_system_counts(offload: OffloadedExperts) -> None:
    runtime = offload.use(settings(offload, 4, eviction="lru"))
    if not runtime.memory.reader.direct:
        pytest.skip("no O_DIRECT here")

    def read_bytes() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("rchar:")).split()[1])

    steps(offload)
    runtime.reset()
    before = read_bytes()
    steps(offload)
    counted = runtime.stats.bytes
    own = len(Path("/proc/self/io").read_text())
    assert counted > 0 and 0 <= read_bytes() - before - counted < 20 * own + 65536


def test_a_replayed_trace_gives_the_live_hits(offload: OffloadedExperts) -> None:
    """The cache alone, driven by the recorded needs, and no loader: LRU and Belady as they were live."""
    runtime = offload.use()
    runtime.trace = []
    steps(offload)
    trace = runtime.trace
    keys = [(row, expert) for row, experts in trace for expert in experts]
    hits = {}
    for name in ("lru", "least_stale", "belady"):
        policies = [Belady(keys) if name == "belady" else eviction_policy(name) for _ in range(2)]
        live = offload.use(settings(offload, 8), eviction=policies[0])
        steps(offload)
        hits[name] = live.stats.hits
        cache, replayed, token, last = SlotCache(8, policies[1]), 0, 0, 99
        for row, experts in trace:
            token, last = token + (row <= last), row
            cache.token, cache.row = token, row
            with cache.lock:
                cache.wanted.update((row, e) for e in experts)
                present = [e for e in experts if cache.find_locked((row, e)) is not None]
            replayed += len(present)
            for expert in [*present, *(e for e in experts if e not in present)]:
                with cache.lock:
                    if cache.find_locked((row, expert)) is None:
                        slot = cache.reserve_locked((row, expert), False)
                        assert slot is not None
                        cache.loaded_locked(slot)
                    held = cache.hold_locked((row, expert))
                assert held is not None
                cache.release([held])
            cache.wanted.clear()
        assert replayed == live.stats.hits, name
    assert hits["belady"] >= max(hits.values())


def test_an_oracle_reads_everything_ahead_and_shuffled_predictions_do_not(offload: OffloadedExperts) -> None:
    runtime = offload.use()
    runtime.trace = []
    right = steps(offload)
    trace = runtime.trace
    recalls = []
    for predictor in (Oracle(trace), Shuffled(Oracle(trace), EXPERTS)):
        live = offload.use(settings(offload, 3 * TOP_K + 1), predictor)
        assert torch.equal(steps(offload), right)
        recalls.append(live.stats.recall)
    assert recalls[0] > recalls[1]
    assert recalls[0] > 0.6  # all but the first layer's, which nothing comes before


def test_a_throttle_is_as_slow_as_it_says() -> None:
    throttle = Throttle(1e6)
    began = time.perf_counter()
    for _ in range(4):
        with throttle.taking(5000):
            pass
    assert time.perf_counter() - began >= 0.019


def test_closing_ends_the_threads(offload: OffloadedExperts) -> None:
    before = threading.active_count()
    runtime = ExpertRuntime(offload.store, settings(offload, 4, threads=2))
    assert threading.active_count() == before + 2
    runtime.close()
    assert threading.active_count() == before


def test_the_slot_machine_under_threads() -> None:
    """Random holds, loads and speculation from several threads; every invariant at every step."""
    cache = SlotCache(5, eviction_policy("lru"))
    content: list[Any] = [None] * 5
    problems: list[str] = []

    def worker(seed: int) -> None:
        import random

        draw = random.Random(seed)
        for step in range(1500):
            key = (draw.randrange(3), draw.randrange(4))
            with cache.lock:
                if seed == 0 and step % 10 == 0:
                    cache.token += 1
                slot = cache.find_locked(key)
                held = cache.hold_locked(key)
                loading = cache.reserve_locked(key, draw.random() < 0.5) if slot is None else None
                keys = [s.key for s in cache.slots if s.key is not None]
                if len(set(keys)) != len(keys):
                    problems.append("an expert is in two slots")
                if any((s.state is State.FREE) != (s.key is None) for s in cache.slots):
                    problems.append("a free slot has an expert")
            if held is not None:
                generation = held.generation
                for _ in range(3):
                    if content[held.index] != key or held.state is not State.READY or held.generation != generation:
                        problems.append("a held slot changed hands")
                cache.release([held])
            if loading is not None:
                content[loading.index] = None
                time.sleep(0)
                content[loading.index] = key
                with cache.lock:
                    if draw.random() < 0.1:
                        content[loading.index] = None
                        cache.abandon_locked(loading)
                    else:
                        cache.loaded_locked(loading)

    threads = [threading.Thread(target=worker, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not problems and not any(thread.is_alive() for thread in threads)
    assert all(slot.refs == 0 and slot.state is not State.LOADING for slot in cache.slots)
