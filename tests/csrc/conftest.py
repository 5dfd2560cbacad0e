"""Every test here runs on each variant of the kernel that this processor can run
(library.VARIANTS), but for avx512vnni: wherever that runs, native is the same code.
"""

from __future__ import annotations

import pytest

from multirate.model.native import library


@pytest.fixture(autouse=True, params=[name for name in library.VARIANTS if name != "avx512vnni"])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    monkeypatch.setenv("MULTIRATE_KERNEL_VARIANT", name)
    try:
        library.kernel()
    except library.NativeUnavailable as reason:
        # code that a compiler refuses is a defect; no compiler or a busy machine is not
        assert "could not build" not in str(reason) or "timed out" in str(reason), reason
        pytest.skip(str(reason))
    return name
