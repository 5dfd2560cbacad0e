"""Compiles the kernel, src/multirate/csrc, to one library with code for every instruction set.

Most of it is compiled once, for any processor of the machine's kind. The inner loops and the
products with quantised weights are compiled for each instruction set of TARGETS as well; which of
these run is decided when the library is loaded (csrc/weights/arch.c).
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
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

TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86": {
        "avx2": ("-march=haswell",),
        "avx_vnni": ("-march=haswell", "-mavxvnni"),
        "avx512": ("-march=skylake-avx512",),
        "avx512_vnni": ("-march=cascadelake",),
    },
    "arm": {"neon": ("-march=armv8.2-a+dotprod",)},
}
"""The instruction sets of a kind of processor, and what makes a compiler use them."""

_KINDS = {"x86_64": "x86", "AMD64": "x86", "aarch64": "arm", "arm64": "arm"}

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
        found.update(path.name.encode() + path.read_bytes())
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
        lines = said.splitlines() or [what]
        raise BuildFailed(next((line for line in lines if "error" in line), lines[-1]))


def compile_library(compiler: str, flags: Sequence[str], built: Path) -> None:
    """Compiles the kernel for this machine to the file `built`, on all processors. The objects are
    left beside it. flags: beside FLAGS. Raises BuildFailed.
    """
    folder = built.parent
    every = sorted(units(platform.machine()), key=lambda unit: not unit.flags)  # the longest first

    def make(unit: Unit, *more: str) -> None:
        made = folder / f"{unit.name}.o"
        command = [compiler, *FLAGS, *flags, *unit.flags, *more, "-c", str(unit.source)]
        _run([*command, "-o", str(made)], made)

    def link(*more: str) -> None:
        objects = [str(folder / f"{unit.name}.o") for unit in every]
        _run([compiler, *FLAGS, *flags, "-shared", *objects, *more, "-o", str(built), "-lm"], built)

    # OpenMP shares torch's threads; a compiler without it gets the kernel's own pool
    [threads] = [unit for unit in every if unit.name == "threads"]
    openmp = ["-fopenmp"]
    try:
        make(threads, *openmp)
    except BuildFailed as problem:
        if "it took" in str(problem):
            raise  # so it would without
        openmp = []
        make(threads)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(make, [unit for unit in every if unit != threads]):
            pass
    try:
        link(*openmp)
    except BuildFailed:
        if not openmp:
            raise
        make(threads)  # it has OpenMP's header and not its library
        link()
