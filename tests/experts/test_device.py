"""Slots on a device: the order of copies and events, on CPU with queues that run late on
purpose.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multirate.errors import UserError
from multirate.experts.memory import DeviceMemory
from multirate.experts.model import OffloadedExperts, load_without_experts
from multirate.experts.pack import pack
from multirate.experts.runtime import ExpertSettings
from multirate.experts.store import ExpertStore

from .test_offloading import logits
from .tiny import save


class Recorder:
    """Copies at once, and keeps what was asked: ("mark", event) and ("copy", address, event it ran
    behind).
    """

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.events = 0

    def allocate(self, size: int) -> torch.Tensor:
        return torch.full((size,), 0xFF, dtype=torch.uint8)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def mark(self) -> int:
        self.events += 1
        self.asked.append(("mark", self.events))
        return self.events

    def copy(self, to: torch.Tensor, source: torch.Tensor, after: Any | None) -> None:
        self.asked.append(("copy", to.data_ptr(), after))
        to.copy_(source)


@pytest.fixture(scope="module", params=["olmoe", "gpt_oss"])
def offload(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save(request.param, folder)
    pack(folder, folder / "experts")
    made = OffloadedExperts(load_without_experts(folder), ExpertStore.open(folder / "experts"))
    yield made
    made.remove()


@pytest.mark.parametrize("predictor", ["none", "next_layer_gate"])
@pytest.mark.parametrize("slots", [3, 7])
def test_bits_and_order(offload: OffloadedExperts, slots: int, predictor: str) -> None:
    offload.copies = None
    offload.use()
    resident = logits(offload.model)
    offload.copies = recorder = Recorder()
    size = offload.store.index.record.bytes
    runtime = offload.use(ExpertSettings(slots * size), predictor)
    computed: list[int] = []
    held = runtime.cache.hold

    def hold(key: Any) -> Any:
        if (slot := held(key)) is not None:
            recorder.asked.append(("compute", runtime.memory.slots[slot.index].data_ptr()))
            computed.append(slot.index)
        return slot

    runtime.cache.hold = hold  # type: ignore[method-assign]
    assert torch.equal(logits(offload.model), resident)
    assert len(computed) > slots, "slots are used again"
    assert runtime.stats.bytes == size * sum(1 for one in recorder.asked if one[0] == "copy")
    unmarked: set[int] = set()  # slots that a compute has begun with since the last event
    behind: dict[int, int] = {}  # slot → the event that ends the last compute with it
    for what, *more in recorder.asked:
        if what == "compute":
            unmarked.add(more[0])
        elif what == "mark":
            behind |= dict.fromkeys(unmarked, more[0])
            unmarked = set()
        else:
            address, after = more
            assert address not in unmarked, "a slot is overwritten while it is computed with"
            assert after == behind.get(address), (
                "a copy does not wait for the last compute with its slot"
            )
    offload.copies = None


def test_pinned_memory_that_cannot_be_had(offload: OffloadedExperts) -> None:
    class Full(Recorder):
        def pinned(self, size: int) -> torch.Tensor:
            raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(UserError, match=r"bytes of pinned host memory.*out of memory"):
        DeviceMemory(offload.store, 3, Full())
