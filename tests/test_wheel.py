"""hatch_build.py: what a wheel has of the kernel, with a compiler and without."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNEL = "multirate/runtime/native/kernel.so"


def built(folder: Path, **environment: str) -> tuple[str, zipfile.ZipFile, str]:
    """A wheel's name, its content, and what the build said."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert not done.returncode, done.stderr
    [wheel] = folder.glob("*.whl")
    return wheel.name, zipfile.ZipFile(wheel), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX system")
def test_a_wheel_has_the_library_for_its_platform(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && echo junk > "$2"; shift; done\n'
    )
    compiler.chmod(0o755)
    name, content, _ = built(tmp_path / "wheel", CC=str(compiler))
    tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert name.endswith(f"-py3-none-{tag}.whl")
    assert content.read(KERNEL) == b"junk\n"
    assert "multirate/csrc/include/model.h" in content.namelist()
    assert "multirate/serving/page/index.html" in content.namelist()


@pytest.mark.slow
def test_without_a_compiler_it_has_the_sources_alone(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no headers >&2\nexit 1\n")
    compiler.chmod(0o755)
    name, content, said = built(tmp_path / "wheel", CC=str(compiler))
    assert name.endswith("-py3-none-any.whl")
    assert (
        KERNEL not in content.namelist() and "multirate/csrc/include/model.h" in content.namelist()
    )
    assert "the wheel has no compiled kernel (no headers); it is compiled on first use" in said
