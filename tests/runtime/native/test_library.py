"""Building, keeping and loading the kernel where something is missing or broken. Each start is a
process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_process import FreshProcess, run
from native_kernel import on_arch, skip_without_kernel

from multirate.errors import UserError
from multirate.runtime.native import abi, build, library

WITHOUT_ZIG = "import sys; sys.modules['ziglang'] = None\n"
START = f"""{WITHOUT_ZIG}
from multirate.runtime.load import load_decoder
from multirate.loading.hub import load_model
model = load_model("tiny", dtype="bfloat16").model
print(type(load_decoder(model)).__name__, type(load_decoder(model)).__name__)
"""


@pytest.fixture(autouse=True)
def kernel() -> str:
    """Instead of this folder's fixture, which builds for the test's own process."""
    if os.name != "posix" or not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("needs a C compiler")
    return "own"


def begin(cache: Path, **environment: str) -> FreshProcess:
    settings = {
        **os.environ,
        "MULTIRATE_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
        "MULTIRATE_KERNEL_FLAGS": "-O0",
    }
    return FreshProcess(START, env={**settings, **environment})


def start(cache: Path, **environment: str) -> tuple[list[str], list[str]]:
    """The decoders that a process takes, twice, and the lines that it says to its user."""
    done = begin(cache, **environment).finish()
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), [line for line in done.stderr.splitlines() if "Notice" in line]


def built(cache: Path) -> list[Path]:
    return sorted(cache.glob("multirate/kernel-*.so"))


NATIVE = ["NativeDecoder"] * 2
OWN = ["HFDecoder"] * 2
NO_COMPILER = {"CC": "/nonexistent/cc", "PATH": ""}
WRITE_JUNK = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo junk > "$2"; shift; done\n'


def test_without_a_compiler_the_user_is_told_once(tmp_path: Path) -> None:
    decoders, said = start(tmp_path, **NO_COMPILER)
    assert decoders == OWN
    assert len(said) == 1
    for part in ("no C compiler (cc, gcc or clang) was found", "slower", "CC="):
        assert part in said[0]


def test_a_compiler_that_fails_is_named_once(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho no headers >&2\nexit 1\n")
    compiler.chmod(0o755)
    decoders, said = start(tmp_path, CC=str(compiler))
    assert decoders == OWN
    assert len(said) == 1
    assert f"{compiler} could not build the kernel (no headers)" in said[0]


def test_switching_the_kernel_off_needs_no_telling(tmp_path: Path) -> None:
    assert start(tmp_path, MULTIRATE_NATIVE="0") == (OWN, [])


@pytest.mark.slow
def test_a_kernel_outlives_its_compiler_and_damage_is_noticed(tmp_path: Path) -> None:
    assert start(tmp_path) == (NATIVE, [])
    [kept] = built(tmp_path)
    whole = kept.read_bytes()
    assert start(tmp_path, **NO_COMPILER) == (NATIVE, [])

    kept.write_bytes(whole[: len(whole) // 2])
    assert start(tmp_path) == (NATIVE, [])
    assert kept.read_bytes() == whole

    kept.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    decoders, said = start(tmp_path, **NO_COMPILER)
    assert decoders == OWN
    assert len(said) == 1
    assert not built(tmp_path)


@pytest.mark.parametrize("obstacle", ["multirate", "."])
def test_a_cache_folder_that_cannot_be_used(tmp_path: Path, obstacle: str) -> None:
    cache = tmp_path / "cache"
    if obstacle == "multirate":
        cache.mkdir()
    (cache / obstacle).resolve().write_text("a file where a folder should be")
    decoders, said = start(cache)
    assert decoders == NATIVE
    assert len(said) == 1
    assert str(cache / "multirate") in said[0] and "MULTIRATE_CACHE" in said[0]


@pytest.mark.slow
def test_processes_that_build_at_once(tmp_path: Path) -> None:
    processes = [begin(tmp_path) for _ in range(3)]
    for process in processes:
        done = process.finish()
        assert (done.returncode, done.stdout.split()) == (0, NATIVE), done.stderr
    assert len(built(tmp_path)) == 1
    assert all(path.suffix == ".so" for path in (tmp_path / "multirate").iterdir())


@pytest.mark.slow
def test_the_command_line_says_it_and_what_follows(tmp_path: Path) -> None:
    code = f"{WITHOUT_ZIG}from multirate.cli.main import run; sys.exit(run())"
    words = ["generate", "-p", "A", "-n", "2", "--speculate", "never"]
    done = run(code, *words, env={**os.environ, "MULTIRATE_CACHE": str(tmp_path), **NO_COMPILER})
    assert done.returncode == 0, done.stderr
    # on some processors a third says that torch's logits depend on the length of a pass
    assert [line[:41] for line in done.stderr.splitlines()][:2] == [
        "note: the native kernel is not used becau",
        "note: expanding the quantised weights to ",
    ]


def test_a_failed_attempt_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decoder asks for the kernel, and a failing compiler takes seconds."""
    counter = tmp_path / "calls"
    compiler = tmp_path / "broken"
    compiler.write_text(f"#!/bin/sh\necho call >> {counter}\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("MULTIRATE_CACHE", str(tmp_path))
    for _ in range(3):
        with pytest.raises(library.NativeUnavailable, match="exit code 1"):
            library.kernel()
    assert counter.read_text() == "call\n"


@pytest.mark.parametrize(
    "ending, words",
    [
        ("exit 0", "it wrote no file"),
        ("printf 'caf\\351\\n' >&2; exit 1", "caf\ufffd"),
    ],
)
def test_odd_messages_of_a_compiler_end_nothing(tmp_path: Path, ending: str, words: str) -> None:
    """In any encoding, on either stream; what counts is the file."""
    compiler, built = tmp_path / "cc", tmp_path / "kernel.so"
    odd = "#!/bin/sh\nprintf '\\377\\376 odd\\n' >&2\nprintf '\\377'\n"
    compiler.write_text(odd + f"{ending}\n")
    compiler.chmod(0o755)
    with pytest.raises(library.NativeUnavailable) as caught:
        library._compile((str(compiler),), (), built)
    assert words in str(caught.value)
    compiler.write_text(odd + WRITE_JUNK)
    library._compile((str(compiler),), (), built)
    assert built.read_text() == "junk\n"


def test_a_cache_whose_name_is_not_utf8_costs_a_line(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    decoders, said = start(folder)
    assert decoders == NATIVE and not built(folder)
    assert len(said) == 1 and "not UTF-8" in said[0] and "set MULTIRATE_CACHE" in said[0]


def test_a_compiler_that_does_not_end_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, counter = tmp_path / "cc", tmp_path / "calls"
    compiler.write_text(f"#!/bin/sh\necho call >> {counter}\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "LONGEST", 1)
    with pytest.raises(library.NativeUnavailable, match=r"\(it took more than 1 seconds\)"):
        library._compile((str(compiler),), (), tmp_path / "kernel.so")
    assert counter.read_text() == "call\n"


def test_a_library_that_cannot_be_loaded_is_not_kept(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\n{WRITE_JUNK}")
    compiler.chmod(0o755)
    with pytest.raises(OSError):
        library._build((str(compiler),), (), tmp_path / "cache", "kernel")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("arch", ["sse9", "generic,avx2"])
def test_an_unknown_instruction_set_is_refused(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_kernel()
    monkeypatch.setenv("MULTIRATE_ARCH", arch)
    with pytest.raises(
        UserError, match=f"MULTIRATE_ARCH is '{arch}'; this processor has: .*generic"
    ):
        library.kernel()


def test_the_instruction_set_that_is_asked_for_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_arch("generic"):
        library.kernel().mr_choose_arch(abi.NULL)
        monkeypatch.setenv("MULTIRATE_ARCH", "generic")
        assert abi.ffi.string(library.kernel().mr_arch()) == b"generic"


def test_other_processors_get_what_their_compiler_can_make() -> None:
    """The inner loops once, and nothing of x86."""
    units = build.units("aarch64")
    [inner] = [unit for unit in units if unit.source.name == "vectors.c"]
    assert inner.flags == ("-DVECTORS=generic_vectors",)
    assert not any("x86" in unit.name for unit in units)
    names = [unit.name for unit in build.units("x86_64")]
    assert len(names) == len(set(names)) > len(units)


def test_a_wheels_library_is_used_if_it_has_these_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one function: others are looked up when they are called."""
    [compiler] = build.find_compiler("cc") or pytest.skip("needs a C compiler")
    for digest, used in ((build.source_digest(), True), ("of others", False)):
        source, made = tmp_path / "digest.c", tmp_path / f"{used}.so"
        source.write_text(f'const char *mr_source_digest(void) {{ return "{digest}"; }}\n')
        subprocess.run([compiler, "-shared", "-fPIC", source, "-o", made], check=True)
        monkeypatch.setattr(library, "PACKAGED", made)
        assert (library._packaged() is not None) == used
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    monkeypatch.setattr(library, "PACKAGED", broken)
    assert library._packaged() is None


def test_zig_compiles_where_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert build.find_compiler("cc") == (sys.executable, "-m", "ziglang", "cc")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert build.find_compiler("cc") is None
