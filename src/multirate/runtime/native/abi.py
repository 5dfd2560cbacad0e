"""The kernel's structures and prototypes as cffi reads them from csrc/include/, the only place that
defines them.

Memory of a structure belongs to the object that `new` or `array` returns; the caller must keep
alive what its pointers point to. `tensor` is the only way from a tensor to a pointer: it has the
type of the tensor's values, so that cffi refuses it where the kernel reads others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from cffi import FFI
from torch import Tensor

from multirate.runtime.native.build import SOURCE_FOLDER
from multirate.runtime.noise import Noise
from multirate.runtime.rows import Rows

CData = Any
"""A C value: a structure, an array or a pointer. cffi has no types that a checker could use."""


HEADERS = [SOURCE_FOLDER / "include" / f"{name}.h" for name in ("model", "speculate", "experts")]
"""The kernel's contract, in the order in which they are read."""


def declarations() -> str:
    """The headers without the lines that are for the compiler; constants stay."""
    lines = [line for header in HEADERS for line in header.read_text("utf-8").splitlines()]
    return "\n".join(line for line in lines if not line.startswith("#") or _is_constant(line))


def _is_constant(line: str) -> bool:
    words = line.split()
    return words[0] == "#define" and len(words) > 2


def constant(name: str) -> int:
    """The number that the headers define `name` as."""
    lines = (line.split() for line in declarations().splitlines() if line.startswith("#"))
    return next(int(words[2]) for words in lines if words[1] == name)


def _parsed() -> FFI:
    made = FFI()
    made.cdef(declarations())
    return made


ffi = _parsed()
NULL = ffi.NULL
_VOID, _INTS, _LONGS = ffi.typeof("void *"), ffi.typeof("int32_t[]"), ffi.typeof("int64_t[]")
_FLOATS, _DOUBLES, _BYTES = ffi.typeof("float[]"), ffi.typeof("double[]"), ffi.typeof("uint8_t[]")
_ADDRESS, _ROWS = ffi.typeof("uintptr_t"), ffi.typeof("Rows *")
_POINTERS = {
    torch.float32: ffi.typeof("float *"),
    torch.bfloat16: ffi.typeof("bf16 *"),
    torch.float64: ffi.typeof("double *"),
    torch.int64: ffi.typeof("int64_t *"),
    torch.int32: ffi.typeof("int32_t *"),
    torch.uint8: ffi.typeof("uint8_t *"),
    torch.bool: ffi.typeof("uint8_t *"),
}


def at(address: int | CData | None) -> CData:
    """The address of something as a pointer that fits every parameter; None is NULL."""
    return ffi.cast(_VOID, address or 0)


def floats_for(*shape: int) -> Tensor:
    """Uninitialised fp32 memory for the kernel, whatever torch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def copied(x: Tensor) -> Tensor:
    """x in fp32 memory of its own, for the kernel to change."""
    return x.float().clone(memory_format=torch.contiguous_format)


def tensor(values: Tensor | None, strided: bool = False) -> CData:
    """Where a tensor's values lie, as a pointer to their type, good as long as the tensor is; None
    is NULL. strided: rows may lie apart. TypeError for memory that the kernel cannot read.
    """
    if values is None:
        return NULL
    kind = _POINTERS.get(values.dtype)
    if kind is None or not values.is_cpu or not (strided or values.is_contiguous()):
        raise TypeError(
            f"the kernel reads contiguous CPU memory, not {values.dtype} {list(values.shape)} "
            f"with strides {values.stride()} on {values.device}"
        )
    place = values.data_ptr()
    if not place and values.numel():
        raise TypeError(f"the kernel reads memory, which a {type(values).__name__} does not have")
    return ffi.cast(kind, place)


def packed(values: Tensor | None) -> CData:
    """As `tensor`, for memory whose layout is the packer's: the pointer fits every parameter."""
    return NULL if values is None else at(tensor(values.view(torch.uint8)))


def address(value: CData) -> int:
    """Where a structure, an array or a pointer's target lies."""
    return int(ffi.cast(_ADDRESS, value))


def _array(kind: CData, dtype: np.dtype, array: np.ndarray) -> CData:
    if array.dtype != dtype:
        raise TypeError(f"the kernel reads {dtype} here, not {array.dtype}")
    return ffi.from_buffer(kind, array)


_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_FLOAT32, _FLOAT64, _UINT8 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.uint8)


def ints(array: np.ndarray) -> CData:
    """int32 array → pointer, good as long as the array is."""
    return _array(_INTS, _INT32, array)


def longs(array: np.ndarray) -> CData:
    """int64 array → pointer, good as long as the array is."""
    return _array(_LONGS, _INT64, array)


def floats(array: np.ndarray) -> CData:
    """float32 array → pointer, good as long as the array is."""
    return _array(_FLOATS, _FLOAT32, array)


def doubles(array: np.ndarray) -> CData:
    """float64 array → pointer, good as long as the array is."""
    return _array(_DOUBLES, _FLOAT64, array)


def flags(array: np.ndarray) -> CData:
    """bool or uint8 array → pointer, good as long as the array is."""
    return _array(_BYTES, _UINT8, array.view(np.uint8) if array.dtype == np.bool_ else array)


@functools.cache
def _kinds(kind: str) -> dict[str, str]:
    fields = ffi.typeof(kind).fields
    return {name: field.type.kind for name, field in fields}


def new(kind: str, /, **fields: Any) -> CData:
    """A zeroed structure of csrc/include/ with these fields: numbers, structures (copied), and for
    pointers structures, arrays, addresses or None.
    """
    made = ffi.new(f"{kind} *")
    kinds = _kinds(kind)
    for name, value in fields.items():
        field = kinds[name]
        if field == "pointer" and (value is None or isinstance(value, int)):
            value = at(value)
        elif field == "struct" and ffi.typeof(value).kind == "pointer":
            value = value[0]
        setattr(made, name, value)
    return made


def rows_of(rows: Rows, capacity: int) -> CData:
    """The kernel's view of `rows` in a cache of so many slots a sequence, good as long as they
    are.
    """
    made = ffi.new(_ROWS)
    made.seq, made.slot, made.pos = ints(rows.seq), ints(rows.slot), ints(rows.pos)
    made.prefix, made.tree = ints(rows.prefix), longs(rows.tree)
    if rows.accelerated is not None:
        made.adapted = flags(rows.accelerated)
    made.count, made.capacity = len(rows.seq), capacity
    return made


def noise_of(noise: Sequence[Noise]) -> CData:
    """The kernel's view of the noise of places, one after the other, good as long as they are."""
    made = ffi.new("Noise[]", len(noise))
    for to, one in zip(made, noise, strict=True):
        to.table = ints(one.table)
        to.key, to.place, to.unit, to.scale = one.key, one.place, one.unit, one.scale
    return made


def array(kind: str, items: Sequence[CData]) -> CData:
    """Copies of structures, one after the other."""
    made = ffi.new(f"{kind}[]", len(items))
    for i, item in enumerate(items):
        made[i] = item[0] if ffi.typeof(item).kind == "pointer" else item
    return made


def pointers(kind: str, addresses: Sequence[int | None]) -> CData:
    """An array of addresses of structures."""
    return ffi.new(f"{kind} *[]", [at(one) for one in addresses])
