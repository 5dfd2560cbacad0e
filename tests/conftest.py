"""What every test may rely on."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """A shell's background jobs begin with SIGINT ignored, and so would the tests of Ctrl-C and
    their children.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def torch_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread, as tiny models are faster so; two where the kernel shares its work among them."""
    before = torch.get_num_threads()
    name = request.node.nodeid.lower()
    torch.set_num_threads(2 if any(part in name for part in ("native", "csrc", "kernel")) else 1)
    yield
    torch.set_num_threads(before)
