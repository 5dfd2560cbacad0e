"""Both ways of reading keep the same contract: order, promotion, preemption, cancelling, errors."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from native_kernel import skip_without_kernel

from multirate.experts.reader import Arena, RecordReader, Throttle
from multirate.experts.reads import Ended, NativeReads, Reads, ThreadReads

SIZE, CHUNK, SLOTS = 16384, 4096, 12
RATE = 2e6  # a chunk takes 2 ms, a record 8
SLOW = 1e5  # 40 and 160: whatever else the machine does, a read that has begun is not over

Make = Callable[..., Reads]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    torch.manual_seed(0)
    path.write_bytes(torch.randint(0, 256, (SLOTS * SIZE,), dtype=torch.uint8).numpy().tobytes())
    return path


@pytest.fixture(params=["native", "system", "threads"])
def make(request: pytest.FixtureRequest, data: Path) -> Iterator[tuple[Make, Arena]]:
    """make(rate, threads) → reads of `data` into the arena."""
    opened: list[Reads] = []
    readers: list[RecordReader] = []
    arena = Arena(SLOTS, SIZE)

    def made(rate: float | None = RATE, threads: int = 1) -> Reads:
        reader = RecordReader(data, Throttle(rate), direct=False)
        readers.append(reader)
        if request.param != "threads":
            skip_without_kernel()
            own = 0 if request.param == "system" else threads
            try:
                reads: Reads = NativeReads(
                    reader.fileno, arena.slots[0], SLOTS, SIZE, rate, own, CHUNK, 4096
                )
            except OSError as reason:
                pytest.skip(str(reason))
        else:

            def fill(slot: int, at: int, begin: int, end: int) -> None:
                reader.read(at + begin, arena.buffers[slot][begin:end])

            reads = ThreadReads(fill, SIZE, threads, CHUNK)
        opened.append(reads)
        return reads

    yield made, arena
    for reads in opened:
        reads.close()
    for reader in readers:
        reader.close()


def drain(reads: Reads, count: int) -> list[Ended]:
    found: list[Ended] = []
    until = time.monotonic() + 10
    while len(found) < count:
        assert time.monotonic() < until, "a read never ends"
        found += reads.ended(0.5)
    return found


def begun(arena: Arena, data: Path) -> None:
    """Returns once the first chunk of the file's first record is in slot 0."""
    first, until = data.read_bytes()[:CHUNK], time.monotonic() + 10
    while bytes(arena.buffers[0])[:CHUNK] != first:
        assert time.monotonic() < until, "a read never begins"
        time.sleep(0.001)


@pytest.mark.parametrize("threads", [1, 3])
def test_every_byte_arrives(make: tuple[Make, Arena], data: Path, threads: int) -> None:
    reads, (_, arena) = make[0](None, threads), make
    for slot in range(SLOTS):
        reads.submit(slot, (SLOTS - 1 - slot) * SIZE, slot, slot % 2 == 0)
    found = drain(reads, SLOTS)
    assert sorted(one.slot for one in found) == list(range(SLOTS))
    assert all(not one.error and one.bytes == SIZE and 0 < one.began <= one.ended for one in found)
    whole = data.read_bytes()
    for slot in range(SLOTS):
        at = (SLOTS - 1 - slot) * SIZE
        assert bytes(arena.buffers[slot]) == whole[at : at + SIZE]
    assert reads.ended() == []


def test_demands_first_then_predictions_in_order(make: tuple[Make, Arena]) -> None:
    reads = make[0]()
    reads.submit(0, 0, 0, True)  # keeps the thread busy
    for slot, order in ((1, 30), (2, 10), (3, 20)):
        reads.submit(slot, slot * SIZE, order, False)
    reads.submit(4, 4 * SIZE, 0, True)
    reads.submit(5, 5 * SIZE, 0, True)
    reads.promote(1)
    assert [one.slot for one in drain(reads, 6)] == [0, 4, 5, 1, 2, 3]


def test_a_prediction_gives_way_between_chunks_and_goes_on(
    make: tuple[Make, Arena], data: Path
) -> None:
    reads, (_, arena) = make[0](SLOW), make
    reads.submit(0, 0, 0, False)
    begun(arena, data)
    reads.submit(1, SIZE, 0, True)
    found = drain(reads, 2)
    assert [one.slot for one in found] == [1, 0]
    assert bytes(arena.buffers[0]) == data.read_bytes()[:SIZE]


def test_cancelling(make: tuple[Make, Arena], data: Path) -> None:
    reads, (_, arena) = make[0](SLOW), make
    reads.submit(0, 0, 0, False)
    reads.submit(1, SIZE, 1, False)
    begun(arena, data)
    assert reads.cancel(1), "it had not begun"
    assert not reads.cancel(0), "it had"
    (one,) = drain(reads, 1)
    assert one.slot == 0 and one.error == errno.ECANCELED and 0 < one.bytes < SIZE
    reads.submit(1, SIZE, 0, True)  # the slot is free for another read
    assert not drain(reads, 1)[0].error
    arena.buffers[0][:] = bytes(SIZE)
    reads.submit(0, 0, 0, False)
    begun(arena, data)
    assert not reads.cancel(0)
    reads.promote(0)  # wanted again in time
    assert not drain(reads, 1)[0].error


def test_a_file_that_ends_early(make: tuple[Make, Arena], data: Path) -> None:
    reads = make[0](None)
    os.truncate(data, SIZE + 100)
    reads.submit(0, 0, 0, True)
    reads.submit(1, SIZE, 0, True)
    found = {one.slot: one for one in drain(reads, 2)}
    assert not found[0].error
    assert found[1].error and "truncated while in use" in found[1].message


def test_the_speed_limit(make: tuple[Make, Arena]) -> None:
    reads = make[0](threads=2)
    began = time.monotonic()
    for slot in range(4):
        reads.submit(slot, slot * SIZE, 0, True)
    drain(reads, 4)
    assert time.monotonic() - began >= 0.95 * 4 * SIZE / RATE


def test_closing_does_not_wait_for_the_queue(make: tuple[Make, Arena]) -> None:
    reads = make[0](rate=2e5)
    for slot in range(SLOTS):
        reads.submit(slot, slot * SIZE, 0, True)
    began = time.monotonic()
    reads.close()
    assert time.monotonic() - began < 0.5
