"""Every test here runs on the kernel as this processor gets it, and on those for AVX2 and for any
other processor.
"""

import pytest
from native_kernel import skip_without_kernel


@pytest.fixture(autouse=True, params=["native", "avx2", "portable"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    variant: str = request.param
    monkeypatch.setenv("MULTIRATE_KERNEL_VARIANT", variant)
    skip_without_kernel()
    return variant
