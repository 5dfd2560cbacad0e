"""Loads the kernel, or builds it once per machine where no wheel brought it. Calls go through cffi.

`kernel()` returns the loaded library or raises `NativeUnavailable` with the reason; callers fall
back to the generic decoder and warn (`say_unavailable`). The build is stored in the user's cache
folder. Its name holds a digest of source and flags, one of the compiler, and one of the file's own
content, which is checked before loading because a damaged library would end the process.
Files are written atomically, so several processes may build at once. If the folder cannot be used,
each process builds its own library.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import platform
import tempfile
import threading
import weakref
from dataclasses import fields
from pathlib import Path

import torch

from multirate.errors import UserError, say_once
from multirate.io import cache_folder, replace_file
from multirate.runtime.machine import usable_processors
from multirate.runtime.native import abi, build
from multirate.runtime.time_split import TimeSplit

PACKAGED = Path(__file__).with_name("kernel.so")
"""Where a wheel has the library (hatch_build.py)."""


class NativeUnavailable(RuntimeError):
    """Why the native kernel cannot be used here. mend: what the user can do about it; "": it was
    switched off.
    """

    def __init__(self, reason: str, mend: str = "") -> None:
        super().__init__(reason)
        self.mend = mend


def _open(path: Path) -> abi.CData:
    """Raises OSError."""
    try:
        return abi.ffi.dlopen(str(path))
    except UnicodeEncodeError:
        raise OSError(errno.EINVAL, "its name is not UTF-8") from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _compile(compiler: tuple[str, ...], flags: tuple[str, ...], built: Path) -> None:
    try:
        build.compile_library(compiler, flags, built)
    except build.BuildFailed as problem:
        raise NativeUnavailable(
            f"{' '.join(compiler)} could not build the kernel ({problem})",
            "install gcc or clang with the C library's headers, or name another compiler with "
            "CC=...",
        ) from None


def _kept(folder: Path, pattern: str) -> abi.CData | None:
    """A library that was built before and is whole; damaged ones are removed."""
    found: list[Path] = []
    with contextlib.suppress(OSError):  # no folder that can be read
        found = sorted(folder.glob(pattern))
    for path in found:
        with contextlib.suppress(
            OSError
        ):  # unreadable, of a system with other libraries, in a folder without programs
            if _digest(path.read_bytes()) == path.stem.rpartition("-")[2]:
                return _open(path)
            path.unlink(missing_ok=True)
    return None


def _packaged() -> abi.CData | None:
    """The library that a wheel brought, if it was built from these sources."""
    if PACKAGED.is_file():
        with contextlib.suppress(OSError):  # of another kind of system
            library = _open(PACKAGED)
            if abi.ffi.string(library.mr_source_digest()) == build.source_digest().encode():
                return library
    return None


def _keep(built: Path, folder: Path, name: str) -> Path:
    """Copies a library into the cache folder, in one step for everyone else. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    content = built.read_bytes()
    target = folder / f"{name}-{_digest(content)}.so"
    replace_file(target, content, mode=0o755)  # others may share the folder
    return target


def _build(compiler: tuple[str, ...], flags: tuple[str, ...], folder: Path, name: str) -> abi.CData:
    with tempfile.TemporaryDirectory(prefix="multirate-") as scratch:
        built = Path(scratch) / "kernel.so"
        _compile(compiler, flags, built)
        kept: Path | None = None
        try:
            kept = _keep(built, folder, name)
            return _open(kept)
        except OSError as error:
            problem = error
        can, wanted = "kept in", "is writable"
        if kept is not None:  # in a folder without programs
            can, wanted = "loaded from", "allows loading programs"
            with contextlib.suppress(OSError):
                kept.unlink()
        library = _open(built)  # the file may go once it is loaded
        say_once(
            f"the compiled kernel cannot be {can} {folder} ({problem.strerror or problem}); "
            "every process builds its own, which takes some seconds, so set MULTIRATE_CACHE to "
            f"a folder that {wanted}"
        )
        return library


@functools.lru_cache(maxsize=8)
def _attempt(
    compiler: tuple[str, ...] | None, folder: Path, flags: tuple[str, ...]
) -> abi.CData | NativeUnavailable:
    """The library or why there is none: asked once, as a failing compiler takes seconds each
    time.
    """
    settings = (build.source_digest(), *flags, platform.machine())
    key = "kernel-" + _digest(" ".join(settings).encode())
    name = f"{key}-{_digest(str(compiler).encode())}"
    try:
        library = None if flags else _packaged()
        if library is None and compiler is not None:
            library = _kept(folder, f"{name}-*.so")
        if library is None and compiler is not None:
            library = _build(compiler, flags, folder, name)
        problem = NativeUnavailable(
            "no C compiler (cc, gcc or clang) was found",
            "install gcc, clang or, with pip, ziglang, or name a compiler with CC=...",
        )
    except NativeUnavailable as failure:
        problem, library = failure, None
    except OSError as failure:
        problem, library = (
            NativeUnavailable(
                f"the compiled kernel could not be loaded ({failure})",
                "set TMPDIR to a folder that allows loading programs",
            ),
            None,
        )
    if library is None:  # one that another compiler built will do
        library = _kept(folder, f"{key}-*.so")
    if library is None:
        return problem
    _loaded.append(library)
    return library


_attempting = threading.RLock()


def kernel() -> abi.CData:
    """The kernel's library, built on first use (some seconds). Raises NativeUnavailable.

    MULTIRATE_ARCH names the instruction set that it uses, where that is not the best; it is read
    when the library is loaded. MULTIRATE_KERNEL_FLAGS are passed to the compiler as well
    (docs/kernel.md: sanitizers).
    """
    environment = os.environ
    return _kernel(
        environment.get("MULTIRATE_ARCH"),
        environment.get("MULTIRATE_NATIVE"),
        environment.get("CC", "cc"),
        environment.get("PATH"),
        environment.get("MULTIRATE_CACHE"),
        environment.get("MULTIRATE_KERNEL_FLAGS", ""),
    )


@functools.lru_cache(maxsize=16)
def _kernel(
    arch: str | None,
    native: str | None,
    compiler: str,
    _path: str | None,
    _cache: str | None,
    extra: str,
) -> abi.CData:
    if native == "0":
        raise NativeUnavailable("MULTIRATE_NATIVE=0 is set")
    if os.name != "posix":
        raise NativeUnavailable("the native kernel needs a POSIX system", "use Linux or macOS")
    with _attempting:
        library = _attempt(build.find_compiler(compiler), cache_folder(), tuple(extra.split()))
    if isinstance(library, NativeUnavailable):
        raise library
    if arch and not library.mr_choose_arch(arch.encode()):
        here = ", ".join(_archs_here(library))
        raise UserError(f"MULTIRATE_ARCH is '{arch}'; this processor has: {here}")
    return library


def _archs_here(library: abi.CData) -> list[str]:
    """The instruction sets that the kernel may use on this processor, best first."""
    names, at = [], 0
    while name := library.mr_arch_name(at):
        names += [abi.ffi.string(name).decode()] if library.mr_has_arch(at) else []
        at += 1
    return names


def say_unavailable(reason: str) -> None:
    """Warns once that the model's own layers run, if `reason` is a missing kernel that was not
    switched off.
    """
    try:
        kernel()
    except NativeUnavailable as problem:
        if problem.mend and str(problem) == reason:
            say_once(
                f"the native kernel is not used because {problem}; the model's own layers run "
                f"instead, which is slower; to fix this, {problem.mend}"
            )


class Workspace:
    """The memory that kernel calls work in, and how many threads they use: at most `threads`, fewer
    while these are faster. Freed with its owner.

    Calls with different workspaces may run side by side; calls with the same one must not.
    """

    def __init__(self, threads: int | None = None) -> None:
        """threads: None: torch's number, limited to the processors that this process may use."""
        self._library = kernel()
        most = min(torch.get_num_threads(), usable_processors()) if threads is None else threads
        self.address: abi.CData = self._library.mr_workspace_open(most)
        if not self.address:
            raise MemoryError("not enough memory for a kernel workspace")
        if threads is None and _all_threads:
            self.set_threads(torch.get_num_threads(), fixed=True)
        weakref.finalize(self, self._library.mr_workspace_close, self.address).atexit = False
        _workspaces.add(self)

    @property
    def threads(self) -> int:
        """How many threads calls use at the moment."""
        return int(self._library.mr_workspace_threads(self.address))

    def set_threads(self, threads: int, fixed: bool = False) -> None:
        """Sets the maximum number of threads from the next call on; if fixed, always that many."""
        self._library.mr_workspace_set_threads(self.address, threads, fixed)

    def spent(self) -> TimeSplit:
        """How much time its calls have taken so far."""
        seconds = abi.ffi.new("double[]", len(_SPENT))
        self._library.mr_spent(self.address, seconds)
        return TimeSplit(**{kind: seconds[place] for kind, place in _SPENT.items()})

    def after_fork(self) -> None:
        """Starts over in a forked process."""
        self._library.mr_workspace_after_fork(self.address)


_all_threads = False


def use_all_threads() -> None:
    """From now on, new workspaces always use as many threads as torch, even where fewer would be
    faster, because the user asked for a number of threads.
    """
    global _all_threads
    _all_threads = True


_SPENT = {field.name: abi.constant(f"SPENT_{field.name.upper()}") for field in fields(TimeSplit)}
_workspaces: weakref.WeakSet[Workspace] = weakref.WeakSet()
_loaded: list[abi.CData] = []


def _after_fork() -> None:
    global _attempting
    _attempting = threading.RLock()
    for library in _loaded:
        library.mr_after_fork()
    for workspace in list(_workspaces):
        workspace.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
