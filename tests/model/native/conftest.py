"""Every test here runs on the kernel as this processor gets it, and on the portable one for wide registers."""

from collections.abc import Iterator

import pytest

from multirate.model.native import library


@pytest.fixture(autouse=True, params=["own", "wide"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "wide":
        monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-DMULTIRATE_WIDE"))
    library.kernel.cache_clear()
    try:
        library.kernel()
    except library.NativeUnavailable as reason:
        pytest.skip(str(reason))
    yield request.param
    library.kernel.cache_clear()
