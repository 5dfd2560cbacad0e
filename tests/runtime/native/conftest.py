"""Every test here runs with AVX-512, with AVX2 and with the code for any processor."""

from collections.abc import Iterator

import pytest
from native_kernel import on_arch


@pytest.fixture(autouse=True, params=["avx512_vnni", "avx2", "generic"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with on_arch(request.param) as name:
        yield name
