"""The text of `multirate --version`: versions, and how this machine would run the native kernel.

It must be quick, so it compiles nothing and imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from multirate import __version__

_INSTRUCTION_SETS = (
    ("AVX-512 with VNNI", {"avx512bw", "avx512_vnni"}),
    ("AVX-512", {"avx512bw"}),
    ("AVX2", {"avx2", "fma"}),
)
"""What the kernel has code for, fastest first, and the processor flags that it needs."""


def version_text() -> str:
    """Three lines: multirate and Python, torch and transformers, and the kernel."""
    return "\n".join(
        (
            f"multirate {__version__} (Python {platform.python_version()})",
            f"{_installed('torch')}, {_installed('transformers')}",
            f"native kernel: {_kernel()}",
        )
    )


def _installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} is not installed"


def _kernel() -> str:
    """Mirrors model/native/library.py, which needs torch."""
    if os.environ.get("MULTIRATE_NATIVE") == "0":
        return "off, because MULTIRATE_NATIVE=0 is set"
    if os.name != "posix":
        return "none, because it needs Linux or macOS"
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
    compiler = next((found for found in map(shutil.which, compilers) if found), None)
    if compiler is None:
        return "none, because there is no C compiler; install gcc or clang, or set CC"
    variant = os.environ.get("MULTIRATE_KERNEL_VARIANT", "native")
    kind = _instruction_set() if variant == "native" else f"variant {variant}"
    return f"{kind}, compiled with {compiler} on first use"


def _instruction_set() -> str:
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                flags = set(line.split())
                break
    except OSError:  # not Linux
        pass
    for name, needed in _INSTRUCTION_SETS:
        if needed <= flags:
            return name
    machine = platform.machine()
    return "portable C" if machine in ("x86_64", "AMD64") else f"portable C, untested on {machine}"
