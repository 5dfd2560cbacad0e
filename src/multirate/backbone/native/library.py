"""Build the kernel once per machine with the system's C compiler, and call it through ctypes.

Contract: `kernel()` returns the loaded library or raises `NativeUnavailable` with the reason; callers fall
back to the generic decoder. The build is cached under the user's cache folder, keyed by source, flags and
processor, and is written atomically.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = ("kernel.c", "kernel.h", "threads.h", "matmul.h", "tile_avx2.h", "tile_wide.h", "fixed_point.h",
           "attention.h", "lookup.h", "stream.h", "round.h", "experts.h", "reads.h", "async_reads.h", "residency.h",
           "loads.h", "thinned.h", "forecasts.h", "mixture.h")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-Wno-psabi")

pointer = ctypes.c_void_p
int32 = ctypes.c_int32


class NativeUnavailable(RuntimeError):
    """Why the native kernel cannot be used here."""


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


def _build(compiler: str, target: Path) -> None:
    folder = Path(__file__).parent
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / "kernel.so"
        # OpenMP shares torch's threads; a compiler without it gets the kernel's own pool
        for openmp in (["-fopenmp"], []):
            command = [compiler, *FLAGS, *openmp, str(folder / "kernel.c"), "-o", str(built), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            if not done.returncode:
                break
        else:
            raise NativeUnavailable(f"{compiler} could not build the kernel: {done.stderr.strip().splitlines()[-1:]}")
        os.replace(built, target)


@functools.lru_cache(maxsize=1)
def kernel() -> ctypes.CDLL:
    """The kernel, built on first use (about two seconds)."""
    if os.environ.get("MULTIRATE_NATIVE") == "0":
        raise NativeUnavailable("MULTIRATE_NATIVE=0 is set")
    if os.name != "posix":
        raise NativeUnavailable("the native kernel needs a POSIX system")
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    folder = Path(__file__).parent
    digest = hashlib.sha256(b"".join((folder / name).read_bytes() for name in SOURCES))
    digest.update(" ".join((*FLAGS, _processor(), platform.machine(), str(compiler))).encode())
    target = _cache_folder() / f"kernel-{digest.hexdigest()[:16]}.so"
    try:
        if not target.exists():
            if compiler is None:
                raise NativeUnavailable("no C compiler (cc, gcc or clang) was found")
            _build(compiler, target)
        library = ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as problem:
        raise NativeUnavailable(f"the native kernel could not be built or loaded: {problem}") from problem
    integers, floats = ctypes.c_int, ctypes.c_float
    library.mr_layers.argtypes = [pointer] * 5 + [integers] + [pointer] * 6 + [integers] * 3
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
    library.mr_set_threads.argtypes = [integers]
    return library
