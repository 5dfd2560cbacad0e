"""The text of `multirate --version`: versions, and how this machine would run the native kernel.

It must be quick, so it compiles nothing and imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from multirate import __version__

_ARCHS = (
    ("avx512_vnni", {"avx512bw", "avx512_vnni"}),
    ("avx512", {"avx512bw"}),
    ("avx_vnni", {"avx2", "fma", "avx_vnni"}),
    ("avx2", {"avx2", "fma"}),
    ("neon", {"asimddp"}),
)
"""The instruction sets of csrc/weights/arch.c, best first, and the processor flags that tell them
apart.
"""


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
    """Mirrors runtime/native/library.py, which needs torch."""
    if os.environ.get("MULTIRATE_NATIVE") == "0":
        return "off, because MULTIRATE_NATIVE=0 is set"
    if os.name != "posix":
        return "none, because it needs Linux or macOS"
    arch = os.environ.get("MULTIRATE_ARCH") or _arch()
    if Path(__file__).parents[1].joinpath("runtime/native/kernel.so").is_file():
        return f"{arch}, compiled already"
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
    compiler = next((found for found in map(shutil.which, compilers) if found), None)
    if compiler is None and find_spec("ziglang"):
        compiler = "zig"
    if compiler is None:
        return "none, because there is no C compiler; install gcc or clang, or set CC"
    return f"{arch}, compiled with {compiler} on first use"


def _arch() -> str:
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):  # of x86, of Arm
                flags = set(line.split())
                break
    except OSError:  # not Linux
        pass
    for name, needed in _ARCHS:
        if needed <= flags:
            return name
    machine = platform.machine()
    return "generic" if machine in ("x86_64", "AMD64") else f"generic, untested on {machine}"
