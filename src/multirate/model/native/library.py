"""Build the kernel once per machine with the system's C compiler, and call it through ctypes.

Contract: `kernel()` returns the loaded library or raises `NativeUnavailable` with the reason; callers fall
back to the generic decoder and say so (`say_unavailable`). The build is kept in the user's cache folder under a name
that holds a digest of source, flags and processor, one of the compiler, and one of the file's own content, which is
compared before the file is loaded: a damaged library would end the process. Files are written atomically, so several
processes may build at once. Where the folder cannot be used, a process builds a library of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import weakref
from pathlib import Path

from multirate.errors import say_once

SOURCES = ("kernel.c", "kernel.h", "workspace.h", "threads.h", "matmul.h", "tile_avx2.h", "tile_wide.h",
           "fixed_point.h", "attention.h", "lookup.h", "stream.h", "round.h", "experts.h", "reads.h",
           "async_reads.h", "residency.h", "loads.h", "thinned.h", "forecasts.h", "mixture.h")
SOURCE_FOLDER = Path(__file__).parents[2] / "csrc"
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-Wno-psabi")

WORKING = (
    "mr_layers", "mr_fill_kv", "mr_linear", "mr_greedy", "mr_stream_step", "mr_head_top", "mr_route", "mr_experts",
    "mr_accelerated_residual", "mr_pruned_experts", "mr_mixture", "mr_round",
)
"""The calls that need a workspace."""

pointer = ctypes.c_void_p
int32 = ctypes.c_int32


class NativeUnavailable(RuntimeError):
    """Why the native kernel cannot be used here. mend: what the user can do about it; "": it was switched off."""

    def __init__(self, reason: str, mend: str = "") -> None:
        super().__init__(reason)
        self.mend = mend


class Linear(ctypes.Structure):
    _fields_ = [("weight", pointer), ("bias", pointer), ("scale", pointer), ("inputs", int32), ("outputs", int32)]


class LowRank(ctypes.Structure):
    _fields_ = [("a", Linear), ("b", Linear), ("rank", int32), ("silu", int32)]


class Adapter(ctypes.Structure):
    _fields_ = [(site, LowRank) for site in ("q", "o", "gate_up", "down", "mlp")]


class Layer(ctypes.Structure):
    _fields_ = [
        *((name, Linear) for name in ("qkv", "o", "gate_up", "down")),
        *((name, pointer) for name in ("norm_attention", "norm_mlp", "q_norm", "k_norm")),
        ("window", int32),
        ("pad", int32),
    ]


class Shape(ctypes.Structure):
    _fields_ = [
        *((name, int32) for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")),
        *((name, int32) for name in ("max_positions", "pad")),
        *((name, ctypes.c_float) for name in ("eps", "attention_scale")),
        *((name, pointer) for name in ("cos", "sin")),
    ]


class LayerCache(ctypes.Structure):
    _fields_ = [("k", pointer), ("v", pointer)]


class Stream(ctypes.Structure):
    _fields_ = [
        *((name, pointer) for name in ("shape", "layers", "adapters", "table")),
        ("carry", Linear),
        *((name, pointer) for name in ("carry_norm", "block_shape", "block", "norm_out", "merged")),
        ("carry_eps", ctypes.c_float),
        ("gate", int32),
    ]


class Sketch(ctypes.Structure):
    _fields_ = [*((name, pointer) for name in ("down", "near", "far")), ("rows", int32), ("pad", int32)]


class PrunedExperts(ctypes.Structure):
    _fields_ = [
        *((name, pointer) for name in ("site", "gate", "up", "down", "constants")),
        ("rows", int32),
        ("pad", int32),
    ]


class Lookup(ctypes.Structure):
    _fields_ = [
        *((name, int32) for name in ("longest", "deepest")),
        *((name, pointer) for name in ("agree", "onward")),
        ("steady", ctypes.c_double),
    ]


class Text(ctypes.Structure):
    _fields_ = [("tokens", pointer), *((name, int32) for name in ("count", "drawn", "followed", "matched"))]


class TreeLimits(ctypes.Structure):
    _fields_ = [
        *((name, int32) for name in ("depth", "width", "nodes", "top")),
        *((name, pointer) for name in ("expand", "keep")),
        *((name, ctypes.c_double) for name in ("sharpness", "least")),
        ("lookup", Lookup),
    ]


class Round(ctypes.Structure):
    _fields_ = [
        *((name, pointer) for name in ("stream", "caches", "block_cache", "draft_head", "head", "norm", "token_map")),
        *((name, pointer) for name in ("ids", "carried", "tokens", "parents", "hidden", "scratch")),
        *((name, int32) for name in ("capacity", "block_capacity", "draft_vocab", "layers", "sequence")),
        *((name, int32) for name in ("drafted", "levels", "true_drawn", "true_followed", "pad")),
        ("text", Text),
    ]


def _cache_folder() -> Path:
    root = os.environ.get("MULTIRATE_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "multirate"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    except OSError:
        return platform.processor() + platform.machine()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _compile(compiler: str, built: Path) -> None:
    source = SOURCE_FOLDER / "kernel.c"
    errors: list[str] = []
    # OpenMP shares torch's threads; a compiler without it gets the kernel's own pool
    for openmp in (["-fopenmp"], []):
        command = [compiler, *FLAGS, *openmp, str(source), "-o", str(built), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        except (OSError, subprocess.SubprocessError) as problem:
            errors = [str(problem)]
            continue
        if not done.returncode:
            return
        errors = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    raise NativeUnavailable(
        f"{compiler} could not build the kernel ({' '.join(errors)})",
        "install gcc or clang with the C library's headers, or name another compiler with CC=...",
    )


def _kept(folder: Path, pattern: str) -> ctypes.CDLL | None:
    """A library that was built before and is whole; damaged ones are removed."""
    for path in sorted(folder.glob(pattern)):
        with contextlib.suppress(OSError):  # unreadable, of a system with other libraries, in a folder without programs
            if _digest(path.read_bytes()) == path.stem.rpartition("-")[2]:
                return ctypes.CDLL(str(path))
            path.unlink(missing_ok=True)
    return None


def _keep(built: Path, folder: Path, name: str) -> Path:
    """Copies a library into the cache folder, in one step for everyone else. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    content = built.read_bytes()
    target = folder / f"{name}-{_digest(content)}.so"
    handle, scratch = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o755)  # others may share the folder
        os.replace(scratch, target)
    except OSError:
        Path(scratch).unlink(missing_ok=True)
        raise
    return target


def _build(compiler: str, folder: Path, name: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="multirate-") as scratch:
        built = Path(scratch) / "kernel.so"
        _compile(compiler, built)
        try:
            return ctypes.CDLL(str(_keep(built, folder, name)))
        except OSError as problem:
            say_once(
                f"the compiled kernel cannot be kept in {folder} ({problem.strerror or problem}): every process "
                "builds its own, which takes some seconds; set MULTIRATE_CACHE to a folder that can be written"
            )
        return ctypes.CDLL(str(built))  # the file may go once it is loaded


@functools.lru_cache(maxsize=8)
def _attempt(compiler: str | None, folder: Path, flags: tuple[str, ...]) -> ctypes.CDLL | NativeUnavailable:
    """The library or why there is none: asked once, as a failing compiler takes seconds each time."""
    sources = b"".join((SOURCE_FOLDER / name).read_bytes() for name in SOURCES)
    settings = " ".join((*flags, _processor(), platform.machine()))
    key = "kernel-" + _digest(sources + settings.encode())
    name = f"{key}-{_digest(str(compiler).encode())}"
    try:
        library = None if compiler is None else _kept(folder, f"{name}-*.so")
        if library is None and compiler is not None:
            library = _build(compiler, folder, name)
        problem = NativeUnavailable(
            "no C compiler (cc, gcc or clang) was found", "install gcc or clang, or name a compiler with CC=..."
        )
    except NativeUnavailable as failure:
        problem, library = failure, None
    except OSError as failure:
        problem, library = NativeUnavailable(
            f"the compiled kernel could not be loaded ({failure})", "set TMPDIR to a folder for programs"
        ), None
    if library is None:  # one that another compiler built will do
        library = _kept(folder, f"{key}-*.so")
    if library is None:
        return problem
    _declare(library)
    return library


_attempting = threading.RLock()


@functools.lru_cache(maxsize=1)
def kernel() -> ctypes.CDLL:
    """The kernel, built on first use (about two seconds). Raises NativeUnavailable."""
    if os.environ.get("MULTIRATE_NATIVE") == "0":
        raise NativeUnavailable("MULTIRATE_NATIVE=0 is set")
    if os.name != "posix":
        raise NativeUnavailable("the native kernel needs a POSIX system", "use Linux or macOS")
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    with _attempting:
        found = _attempt(compiler, _cache_folder(), FLAGS)
    if isinstance(found, NativeUnavailable):
        raise found
    return found


def say_unavailable(reason: str) -> None:
    """Tells the user, once, that the model's own layers are used, where `reason` is that there is no kernel and it was
    not switched off."""
    try:
        kernel()
    except NativeUnavailable as problem:
        if problem.mend and str(problem) == reason:
            say_once(f"the native kernel is not used: {problem}. The model's own layers are, which is slower; to mend "
                     f"it, {problem.mend}")  # fmt: skip


class Workspace:
    """The memory that kernel calls work in, and how many threads they use; freed with its owner.

    Calls with different workspaces may run side by side, calls with the same one must not.
    """

    def __init__(self, threads: int) -> None:
        self._library = kernel()
        address = self._library.mr_workspace_open(threads)
        if not address:
            raise MemoryError("no memory for a kernel workspace")
        self.address: int = address
        weakref.finalize(self, self._library.mr_workspace_close, address).atexit = False
        _workspaces.add(self)

    def set_threads(self, threads: int) -> None:
        """From the next call on."""
        self._library.mr_workspace_set_threads(self.address, threads)

    def after_fork(self) -> None:
        """In a forked process: begins anew."""
        self._library.mr_workspace_after_fork(self.address)


_workspaces: weakref.WeakSet[Workspace] = weakref.WeakSet()
_loaded: list[ctypes.CDLL] = []


def _after_fork() -> None:
    global _attempting
    _attempting = threading.RLock()
    for library in _loaded:
        library.mr_after_fork()
    for workspace in list(_workspaces):
        workspace.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _declare(library: ctypes.CDLL) -> None:
    integers, floats = ctypes.c_int, ctypes.c_float
    library.mr_layers.argtypes = [pointer] * 5 + [integers] + [pointer] * 6 + [integers] * 3
    library.mr_fill_kv.argtypes = [pointer] * 4 + [integers] + [pointer] * 3 + [integers] * 3
    library.mr_linear.argtypes = [pointer, pointer, pointer, floats, integers, pointer, integers]
    library.mr_embed.argtypes = [pointer, pointer, integers, integers, floats, pointer]
    library.mr_greedy.argtypes = [pointer] * 6 + [integers] + [pointer] * 5 + [integers] * 3 + [pointer] * 4
    library.mr_top.argtypes = [pointer, integers, integers, integers, integers, floats, pointer, pointer]
    library.mr_move.argtypes = [pointer, integers, integers, integers, integers, integers, pointer, pointer, integers]
    library.mr_stream_step.argtypes = [
        pointer, pointer, integers, pointer, integers, pointer, integers, integers, *[pointer] * 7,
    ]
    library.mr_head_top.argtypes = [pointer, pointer, floats, pointer, *[integers] * 3, floats, *[pointer] * 3]
    library.mr_route.argtypes = [pointer, pointer, floats, pointer, *[integers] * 4, *[pointer] * 4]
    library.mr_experts.argtypes = [pointer, pointer, integers, *[pointer] * 4]
    library.mr_accelerated_residual.argtypes = [
        *[pointer] * 5, integers, pointer, floats, pointer, pointer, integers, pointer, pointer
    ]
    library.mr_pruned_experts.argtypes = [*[pointer] * 3, integers, pointer, floats, pointer, integers, integers]
    library.mr_combine.argtypes = [pointer, pointer, integers, integers, integers, pointer]
    long, double = ctypes.c_int64, ctypes.c_double
    library.mr_reads_open.argtypes = [integers, pointer, integers, long, long, integers, double, integers, double]
    library.mr_reads_open.restype = pointer
    library.mr_reads_close.argtypes = [pointer]
    library.mr_reads_submit.argtypes = [pointer, integers, long, long, integers]
    library.mr_reads_promote.argtypes = library.mr_reads_cancel.argtypes = [pointer, integers]
    library.mr_reads_ended.argtypes = [pointer, double, *[pointer] * 5]
    library.mr_expert_cache_open.argtypes = library.mr_expert_cache_close.argtypes = [pointer]
    library.mr_expert_cache_open.restype = pointer
    library.mr_expert_cache_predict.argtypes = [pointer, pointer, integers]
    library.mr_expert_cache_load.argtypes = [pointer, pointer, integers]
    library.mr_mixture.argtypes = [*[pointer] * 5, integers, *[pointer] * 6, integers, integers, integers, pointer]
    library.mr_round.argtypes = [pointer, integers, integers, integers, pointer]
    library.mr_workspace_open.argtypes = [integers]
    library.mr_workspace_open.restype = pointer
    library.mr_workspace_set_threads.argtypes = [pointer, integers]
    library.mr_workspace_close.argtypes = library.mr_workspace_after_fork.argtypes = [pointer]
    for name in WORKING:
        function = getattr(library, name)
        function.argtypes = [pointer, *function.argtypes]  # their first argument is the workspace
    _loaded.append(library)
