"""Every test here runs on the kernel as this processor gets it, and on those for AVX2 and for any
other processor.
"""

import pytest

from multirate.model.native import library


@pytest.fixture(autouse=True, params=["native", "avx2", "portable"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    variant: str = request.param
    monkeypatch.setenv("MULTIRATE_KERNEL_VARIANT", variant)
    try:
        library.kernel()
    except library.NativeUnavailable as reason:
        pytest.skip(str(reason))
    return variant
