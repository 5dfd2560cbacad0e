"""`multirate --version`: what it reports of the kernel, and that it needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from multirate.cli.version import version_text


def kernel_line() -> str:
    return version_text().splitlines()[2]


def test_it_names_the_reason_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRATE_NATIVE", "0")
    assert "off, because MULTIRATE_NATIVE=0 is set" in kernel_line()
    monkeypatch.delenv("MULTIRATE_NATIVE")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CC", "none")
    monkeypatch.setitem(sys.modules, "ziglang", None)
    assert "none, because there is no C compiler" in kernel_line()


def test_it_names_the_instruction_set_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MULTIRATE_NATIVE", raising=False)
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setenv("MULTIRATE_ARCH", "avx2")
    line = kernel_line()
    assert line == f"native kernel: avx2, compiled with {sys.executable} on first use"


def test_the_module_runs_as_the_command_and_imports_no_torch() -> None:
    script = (
        "import runpy, sys\nsys.argv = ['multirate', '--version']\n"
        "try:\n    runpy.run_module('multirate', run_name='__main__')\n"
        "except SystemExit as ended:\n    assert not ended.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == version_text()
