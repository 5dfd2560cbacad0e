"""Reads that fail, end early, come late or in another order: a clear error or the same tokens,
never a hang.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import multirate.experts.memory as memory
from multirate.errors import UserError
from multirate.experts.expert_cache import ExpertCache, State
from multirate.experts.loader import ExpertLoader, Prediction
from multirate.experts.model import OffloadedExperts, load_without_experts
from multirate.experts.pack import pack
from multirate.experts.policies import Belady, eviction_policy
from multirate.experts.predictors import Oracle
from multirate.experts.reader import Arena, RecordReader, Throttle
from multirate.experts.reads import Ended, Reads
from multirate.experts.runtime import ExpertRuntime, ExpertSettings
from multirate.experts.stats import ExpertStats
from multirate.experts.store import ExpertStore

from .tiny import EXPERTS, TOP_K, Shuffled, save

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
    runtime = offload.use(settings(offload, 4, eviction="lru", direct=False))
    read, calls = runtime.memory.reader.read, []

    def failing(offset: int, into: memoryview) -> None:
        calls.append(offset)
        if len(calls) == 7:
            raise OSError(5, "Input/output error")
        read(offset, into)

    runtime.memory.reader.read = failing  # type: ignore
    with pytest.raises(
        UserError, match=r"expert \d+ of layer \d could not be read from .*Input/output error"
    ):
        steps(offload)
    assert runtime.stats.errors == 1
    right = steps(offload)  # the disk is back: nothing is left half-read
    offload.use()
    assert torch.equal(right, steps(offload))


@pytest.mark.parametrize("direct", [True, False])
def test_a_disk_that_goes_away(offload: OffloadedExperts, direct: bool) -> None:
    runtime = offload.use(settings(offload, 3, eviction="none", direct=direct))
    steps(offload)
    nothing = os.open(os.devnull, os.O_RDONLY)  # every read ends at once
    os.dup2(nothing, runtime.memory.reader.fileno)
    os.close(nothing)
    with pytest.raises(UserError, match="truncated while in use"):
        steps(offload)


def test_failed_speculation_is_no_error(offload: OffloadedExperts) -> None:
    offload.use()
    right = steps(offload)
    runtime = offload.use(settings(offload, 7, direct=False), "previous_token")
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
    monkeypatch.setattr(
        memory, "CHUNK", 4096
    )  # several chunks a record, so that reads are preempted
    for count in (1, 2):
        runtime = offload.use(settings(offload, 5, threads=count, direct=False), "next_layer_gate")
        read = runtime.memory.reader.read

        def slow(offset: int, into: memoryview, read: Any = read) -> None:
            time.sleep(0.0007 * (offset // 4096 % 3))
            read(offset, into)

        runtime.memory.reader.read = slow  # type: ignore
        assert torch.equal(steps(offload), right)
        assert runtime.stats.speculative_bytes > 0


def test_a_short_read_is_gone_on_with(
    offload: OffloadedExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_file_cut_within_a_block_is_an_error_not_a_loop(
    offload: OffloadedExperts, tmp_path: Path
) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes(offload.store.path.read_bytes()[:5000])
    for direct in (True, False):
        reader, arena = RecordReader(cut, direct=direct), Arena(1, 8192)
        with pytest.raises(OSError, match="truncated while in use"):
            reader.read(0, arena.buffers[0])
        reader.close()


def test_without_direct_reads_the_bytes_are_the_same_and_it_is_said(
    offload: OffloadedExperts,
) -> None:
    offload.use()
    right = steps(offload)
    runtime = offload.use(settings(offload, 4, direct=False))
    assert (
        runtime.note and "page cache" in runtime.note
    ) or runtime.note == "O_DIRECT was switched off"
    assert torch.equal(steps(offload), right)


def test_budgets(offload: OffloadedExperts) -> None:
    record = offload.store.index.record.bytes
    with pytest.raises(UserError, match=f"at least 3 .*{3 * record} bytes"):
        ExpertRuntime(offload.store, ExpertSettings(3 * record - 1))
    with ExpertRuntime(offload.store, ExpertSettings(1 << 40)) as runtime:
        assert len(runtime.cache.slots) == 3 * EXPERTS


@pytest.mark.parametrize(("threads", "counter"), [(1, "rchar:"), (0, "read_bytes:")])
def test_bytes_are_what_the_system_counts(
    offload: OffloadedExperts, threads: int, counter: str
) -> None:
    """What a thread reads by calls, or what the system reads by itself from the disk."""
    runtime = offload.use(settings(offload, 4, eviction="lru", threads=threads))
    if not runtime.memory.reader.direct:
        pytest.skip("no O_DIRECT here")

    def read_bytes() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(counter)).split()[1])

    steps(offload)
    runtime.reset()
    before = read_bytes()
    steps(offload)
    counted = runtime.stats.bytes
    own = len(Path("/proc/self/io").read_text())
    assert counted > 0 and 0 <= read_bytes() - before - counted < 20 * own + 65536


def test_a_replayed_trace_gives_the_live_hits(offload: OffloadedExperts) -> None:
    """The cache alone, driven by the recorded needs, and no loader: LRU and Belady as they were
    live.
    """
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
        cache, replayed, token, last = ExpertCache(8, policies[1]), 0, 0, 99
        for row, experts in trace:
            token, last = token + (row <= last), row
            cache.token, cache.row = token, row
            cache.pin((row, e) for e in experts)
            present = [e for e in experts if cache.find((row, e)) is not None]
            replayed += len(present)
            for expert in [*present, *(e for e in experts if e not in present)]:
                if cache.find((row, expert)) is None:
                    slot = cache.reserve((row, expert), False)
                    assert slot is not None
                    cache.loaded(slot)
                found = cache.find((row, expert))
                assert found is not None
                cache.touch(found)
            cache.pin(())
        assert replayed == live.stats.hits, name
    assert hits["belady"] >= max(hits.values())


def test_an_oracle_reads_everything_ahead_and_shuffled_predictions_do_not(
    offload: OffloadedExperts,
) -> None:
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


def threads() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Threads:")).split()[1])


@pytest.mark.parametrize("direct", [True, False])
def test_closing_ends_the_threads(offload: OffloadedExperts, direct: bool) -> None:
    runtime = ExpertRuntime(offload.store, settings(offload, 4, threads=5, direct=direct))
    opened = threads()
    runtime.close()
    until = time.monotonic() + 5  # a thread that has been joined may still be on its way out
    while threads() > opened - 5 and time.monotonic() < until:
        time.sleep(0.01)
    assert threads() <= opened - 5


class Random(Reads):
    """Reads that end in any order, late, with errors, and are cancelled or not, as the draw has
    it.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw, self.open, self.content = draw, dict[int, int](), dict[int, int]()
        self._cancelled: set[int] = set()

    def submit(self, slot: int, offset: int, order: int, demanded: bool) -> None:
        assert slot not in self.open, "a slot is filled twice at a time"
        self.open[slot] = offset
        self.content.pop(slot, None)

    def promote(self, slot: int) -> None:
        assert slot in self.open
        self._cancelled.discard(slot)

    def cancel(self, slot: int) -> bool:
        assert slot in self.open
        if self._draw.random() < 0.5:
            del self.open[slot]
            return True
        self._cancelled.add(slot)
        return False

    def ended(self, patience: float = 0.0) -> list[Ended]:
        found = [slot for slot in list(self.open) if self._draw.random() < 0.4]
        self._draw.shuffle(found)
        return [self._end(slot) for slot in found]

    def _end(self, slot: int) -> Ended:
        offset, error = self.open.pop(slot), 0
        if slot in self._cancelled and self._draw.random() < 0.8:
            error = errno.ECANCELED
        elif self._draw.random() < 0.03:
            error = errno.EIO
        self._cancelled.discard(slot)
        if not error:
            self.content[slot] = offset
        return Ended(slot, error, 8, 0.0, 0.0)

    def close(self) -> None:
        return


@given(
    seed=st.integers(0, 10**6),
    eviction=st.sampled_from(["none", "lru", "lrfu", "least_stale"]),
    count=st.integers(3, 9),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_the_slot_machine(seed: int, eviction: str, count: int) -> None:
    """Random needs and predictions over reads that end as they like: compute sees the right bytes,
    always.
    """
    draw = random.Random(seed)
    record: Any = SimpleNamespace(layers=(0, 1, 2), record=SimpleNamespace(bytes=8))
    store: Any = SimpleNamespace(
        index=record, path="store", offset=lambda row, expert: 100 * row + expert
    )
    cache, reads = ExpertCache(count, eviction_policy(eviction)), Random(draw)
    loader = ExpertLoader(store, cache, reads, ExpertStats())
    for token in range(12):
        for row in range(3):
            loader.pass_row(token, row)
            waiting = [(row, expert) for expert in draw.sample(range(8), draw.randint(1, 6))]
            cache.pin(waiting)
            loader.forget_failures()
            loader.demand(waiting)
            named = [
                Prediction((r, e), r, draw.random()) for r in range(row + 1, 3) for e in range(8)
            ]
            loader.prefetch(draw.sample(named, draw.randint(0, min(len(named), 6))))
            while waiting:
                try:
                    slot = loader.wait(waiting)
                except UserError as error:
                    assert "could not be read" in str(error)
                    continue  # asked again
                assert slot.key in waiting and slot.state is State.READY
                generation = slot.generation
                loader.poll()
                loader.demand(key for key in waiting if key != slot.key)
                assert (
                    reads.content[slot.index] == store.offset(*slot.key)
                    and slot.generation == generation
                )
                waiting.remove(slot.key)
                cache.release([slot])
                keys = [s.key for s in cache.slots if s.key is not None]
                assert len(set(keys)) == len(keys), "an expert is in two slots"
                assert all((s.state is State.FREE) == (s.key is None) for s in cache.slots)
            cache.pin(())
    assert set(reads.open) == {s.index for s in cache.slots if s.state is State.LOADING}
