"""Compiles the kernel, src/multirate/csrc, to one library with code for every instruction set.

Most of it is compiled once, for any processor of the machine's kind. The inner loops and the
products with quantised weights are compiled for each instruction set of TARGETS as well; which of
these run is decided when the library is loaded (csrc/weights/arch.c).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parents[2] / "csrc"

FLAGS = (
    "-O3",
    "-ffp-contract=off",
    "-std=gnu11",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-Wno-psabi",
)

_AVX2 = ("-march=haswell",)
_AVX512 = (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "cd")))
TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86": {
        "avx2": _AVX2,
        "avx_vnni": (*_AVX2, "-mavxvnni"),
        "avx512": _AVX512,
        "avx512_vnni": (*_AVX512, "-mavx512vnni"),
    },
    "arm": {"neon": ()},
}
"""The instruction sets of a kind of processor, and what makes a compiler use them. (zig reads names
with a hyphen, such as skylake-avx512, in its own way.)
"""

_KINDS = {"x86_64": "x86", "AMD64": "x86", "aarch64": "arm", "arm64": "arm"}

ZIG = (sys.executable, "-m", "ziglang", "cc")

LONGEST = 120
"""Seconds that one file may take."""


class BuildFailed(RuntimeError):
    """What a compiler said, or why it said nothing."""


@dataclass(frozen=True)
class Unit:
    """One call of the compiler: source, and flags beside those of all. name: of its object."""

    name: str
    source: Path
    flags: tuple[str, ...] = ()


def sources() -> list[Path]:
    return sorted(path for path in SOURCE_FOLDER.rglob("*") if path.suffix in (".c", ".h"))


def source_digest() -> str:
    """What tells libraries of different sources apart."""
    found = hashlib.sha256()
    for path in sources():
        found.update(path.relative_to(SOURCE_FOLDER).as_posix().encode() + path.read_bytes())
    found.update(" ".join((*FLAGS, str(TARGETS))).encode())
    return found.hexdigest()[:16]


def units(machine: str) -> list[Unit]:
    """What the library consists of on a machine, as `platform.machine()` has it."""
    own = _KINDS.get(machine)
    made: list[Unit] = []
    for source in sources():
        if source.suffix != ".c":
            continue
        place = source.relative_to(SOURCE_FOLDER).with_suffix("").as_posix().replace("/", ".")
        kind, _, target = source.stem.partition("_")
        if source.name == "vectors.c":  # on Arm, every processor has what it needs
            targets = TARGETS["x86"] if own == "x86" else {}
            made += [
                Unit(f"{place}.{target}", source, (f"-DVECTORS={target}_vectors", *flags))
                for target, flags in {"generic": (), **targets}.items()
            ]
        elif source.name == "digest.c":
            made.append(Unit(place, source, (f'-DSOURCE_DIGEST="{source_digest()}"',)))
        elif kind in TARGETS:
            made += [Unit(place, source, TARGETS[kind][target])] if kind == own else []
        else:
            made.append(Unit(place, source))
    return made


def _run(command: Sequence[str], made: Path) -> None:
    """Raises BuildFailed."""
    # a library that is loaded before Python's own (a sanitizer's) is not meant for the compiler
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=LONGEST, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise BuildFailed(f"it took more than {LONGEST} seconds") from None
    except (OSError, subprocess.SubprocessError) as problem:
        raise BuildFailed(str(problem)) from None
    if done.returncode or not made.is_file():
        said = done.stderr.decode(errors="replace").strip()  # in the encoding of any locale
        what = f"exit code {done.returncode}" if done.returncode else "it wrote no file"
        lines = said.splitlines() if done.returncode and said else [what]
        raise BuildFailed(next((line for line in lines if "error" in line), lines[-1]))


def find_compiler(chosen: str) -> tuple[str, ...] | None:
    """`chosen`, or what else there is: gcc, clang, or zig's from PyPI (ziglang)."""
    found = next(filter(None, map(shutil.which, (chosen, "gcc", "clang"))), None)
    if found:
        return (found,)
    return ZIG if importlib.util.find_spec("ziglang") else None


def compile_library(
    compiler: Sequence[str],
    flags: Sequence[str],
    built: Path,
    machine: str = platform.machine(),
) -> None:
    """Compiles the kernel to the file `built`, on all processors. The objects are left beside it.

    flags: beside FLAGS. machine: what the compiler compiles for. Raises BuildFailed.
    """
    every = sorted(units(machine), key=lambda unit: not unit.flags)  # the longest first

    def object_of(unit: Unit) -> Path:
        return built.with_name(f"{unit.name}.o")

    def make(unit: Unit) -> None:
        command = [*compiler, *FLAGS, *flags, *unit.flags, "-c", str(unit.source)]
        _run([*command, "-o", str(object_of(unit))], object_of(unit))

    make(every.pop())  # a compiler that does not work says so once
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(make, every):
            pass
    objects = [str(object_of(unit)) for unit in units(machine)]
    linked = ("-shared", *objects, "-o", str(built), "-lm", "-ldl")
    _run([*compiler, *FLAGS, *flags, *linked], built)
