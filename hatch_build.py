"""Compiles the kernel into the wheel (runtime/native/build.py), so that whoever installs it needs
no compiler. Without one here, the wheel has the sources alone, and compiles them on first use.

MULTIRATE_WHEEL_FOR=x86_64 or aarch64: for such Linux machines with glibc 2.28 or later, compiled by
zig (the package ziglang), wherever it is built.
"""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACE = "multirate/runtime/native/kernel.so"


def load_build(root: str) -> ModuleType:
    """runtime/native/build.py by itself: the package needs torch."""
    spec = spec_from_file_location(
        "kernel_build", Path(root, "src/multirate/runtime/native/build.py")
    )
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["kernel_build"] = module
    spec.loader.exec_module(module)
    return module


class KernelHook(BuildHookInterface):
    """Adds the compiled kernel to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable" or os.name != "posix":
            return
        build = load_build(self.root)
        machine = os.environ.get("MULTIRATE_WHEEL_FOR")
        if machine:
            compiler = (*build.ZIG, "-target", f"{machine}-linux-gnu.2.28")
            tag = f"manylinux_2_28_{machine}"
        else:
            compiler = build.find_compiler(os.environ.get("CC", "cc"))
            tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        self.scratch = tempfile.TemporaryDirectory(prefix="multirate-")
        built = Path(self.scratch.name, "kernel.so")
        try:
            if compiler is None:
                raise build.BuildFailed("no C compiler was found")
            build.compile_library(compiler, (), built, machine or platform.machine())
        except build.BuildFailed as problem:
            if machine:
                raise
            self.app.display_warning(
                f"the wheel has no compiled kernel ({problem}); it is compiled on first use"
            )
            return
        build_data["force_include"][str(built)] = PLACE
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "scratch"):
            self.scratch.cleanup()
