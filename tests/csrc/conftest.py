"""Every test here runs on each instruction set that the kernel has code for and this processor
has.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from native_kernel import ARCHS, on_arch


@pytest.fixture(autouse=True, params=ARCHS)
def arch(request: pytest.FixtureRequest) -> Iterator[str]:
    with on_arch(request.param) as name:
        yield name
