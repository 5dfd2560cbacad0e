"""Tests of the native kernel are skipped where there is none, and for no other reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from multirate.runtime.native import abi, library

ARCHS = ("avx512_vnni", "avx512", "avx_vnni", "avx2", "neon", "generic")
"""The instruction sets that the kernel has code for, best first."""


def skip_without_kernel() -> None:
    """Skips the test where no kernel can be built. A model that the kernel says it cannot run is
    the test's business: it fails.
    """
    try:
        library.kernel()
    except library.NativeUnavailable as reason:
        # code that a compiler refuses is a defect; no compiler or a busy machine is not
        assert "could not build" not in str(reason) or "it took" in str(reason), reason
        pytest.skip(str(reason))


def choose(arch: str) -> bool:
    """Makes the kernel use an instruction set, if this processor has it."""
    return bool(library.kernel().mr_choose_arch(arch.encode()))


@contextmanager
def on_arch(arch: str) -> Iterator[str]:
    """The kernel uses this instruction set meanwhile; a test is skipped where there is none."""
    skip_without_kernel()
    before = library.kernel().mr_arch()
    if not choose(arch):
        pytest.skip(f"this processor lacks {arch}")
    yield arch
    assert library.kernel().mr_choose_arch(before)


def use_best() -> None:
    library.kernel().mr_choose_arch(abi.NULL)
