"""csrc/include/ as cffi reads it and as the compiler does: sizes and offsets of every field."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from native_kernel import skip_without_kernel

from multirate.runtime.native import abi, library


@pytest.fixture(autouse=True)
def arch() -> str:
    """Instead of this folder's fixture: the headers are the same for all."""
    return "any"


def structures() -> list[str]:
    """Every structure whose fields the headers tell."""
    kinds, structs, _ = abi.ffi.list_types()
    named = [name for name in [*kinds, *structs] if abi.ffi.typeof(name).kind == "struct"]
    return [name for name in named if abi.ffi.typeof(name).fields]


def test_sizes_and_offsets_are_the_compilers(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    names = structures()
    assert {"Linear", "Rows", "Branch", "SpeculativeStep", "DraftLimits"} <= set(names)
    expected, lines = [], []
    for name in names:
        expected.append(f"{name} {abi.ffi.sizeof(name)}")
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, about in abi.ffi.typeof(name).fields:
            expected.append(f"{name}.{field} {about.offset} {abi.ffi.sizeof(about.type)}")
            place = f"offsetof({name}, {field}), sizeof((({name} *)0)->{field})"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", {place});')
    source = tmp_path / "sizes.c"
    body = "\n".join(lines)
    includes = "\n".join(f'#include "{header}"' for header in abi.HEADERS)
    source.write_text(
        f"#include <stddef.h>\n#include <stdio.h>\n{includes}\nint main(void) {{\n{body}\n}}\n"
    )
    program = tmp_path / "sizes"
    environment = {
        name: value for name, value in os.environ.items() if name != "LD_PRELOAD"
    }  # a sanitizer's
    command = [compiler, str(source), "-o", str(program)]
    subprocess.run(command, check=True, env=environment)
    found = subprocess.run(
        [str(program)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert found == expected


def test_every_function_of_the_headers_is_in_the_library() -> None:
    skip_without_kernel()
    kernel = library.kernel()
    functions = set(re.findall(r"\b(mr_\w+)\(", abi.declarations()))
    assert len(functions) > 30
    for name in functions:
        assert getattr(kernel, name)


def test_a_pointer_of_another_type_is_refused() -> None:
    shape = abi.new("Shape", hidden=64)
    with pytest.raises(TypeError):
        abi.new("Branch", layers=shape)
