"""Tests of the native kernel are skipped where there is none, and for no other reason."""

from __future__ import annotations

import pytest

from multirate.model.native import library


def skip_without_kernel() -> None:
    """Skips the test where no kernel can be built. A model that the kernel says it cannot run is
    the test's business: it fails.
    """
    try:
        library.kernel()
    except library.NativeUnavailable as reason:
        pytest.skip(str(reason))
