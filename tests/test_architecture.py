"""Imports point one way, and no module takes part in a circle."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
PACKAGE = SOURCE / "multirate"
LAYERS = (
    ("errors", "torch_modes"),
    ("io", "json_values", "generation_lock"),
    ("guarantee", "tuned"),
    ("runtime",),
    ("provenance",),
    ("decoding",),
    ("methods",),
    ("loading",),
    ("fidelity",),
    ("training",),
    ("experts",),
    ("engine",),
    ("integration",),
    ("serving",),
    ("lab",),
    ("cli",),
    ("__main__",),
)
"""From the bottom to the top: a part imports only from parts below it, and from itself."""
RUNTIME_LAYERS = (
    ("machine", "time_split", "attention_kernels"),
    ("rows", "noise", "transfer", "finite", "quantised"),
    ("kv_cache",),
    ("fused",),
    ("draft_branch",),
    ("captured",),
    ("decoder",),
    ("hf",),
    ("cuda", "native"),
    ("load", "weight_watch"),
)
"""The interface, the model's own layers, what is faster than these, and who chooses."""
LOADING_LAYERS = (("names", "chat_template"), ("explained", "gguf", "conversation"), ("hub",))
LAB_LAYERS = (
    ("depth_baselines", "pages", "calibration"),
    ("bench", "inspection"),
    ("evaluation",),
)


def modules() -> dict[str, ast.Module]:
    """Module name → its syntax tree, of everything but loader files that transformers runs."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if "reference" not in path.parts:
            name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


MODULES = modules()


def imports(node: ast.AST, at_start: bool = True) -> Iterator[tuple[str, bool]]:
    """(module of ours that is imported, whether on import) below `node`; those for type checkers
    are left out.
    """
    for child in ast.iter_child_nodes(node):
        assert not getattr(child, "level", 0), "a relative import would not be checked"
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if (
            isinstance(child, ast.ImportFrom)
            and child.module
            and child.module.startswith("multirate")
        ):
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                yield (inner if inner in MODULES else child.module), at_start
        elif isinstance(child, ast.Import):
            for alias in child.names:
                if alias.name in MODULES:
                    yield alias.name, at_start
        lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(child, at_start and not lazy)


def upward(layers: tuple[tuple[str, ...], ...], prefix: str) -> list[str]:
    """The imports within `prefix` that do not point down, as text."""
    level = {name: i for i, names in enumerate(layers) for name in names}

    def part(module: str) -> str:
        rest = module.removeprefix(prefix).lstrip(".")
        return rest.split(".")[0]

    wrong = []
    for module, tree in MODULES.items():
        if not module.startswith(prefix + ".") or part(module) not in level:
            continue
        for imported, _ in imports(tree):
            below = part(imported) if imported.startswith(prefix + ".") else ""
            if below in level and below != part(module) and level[below] >= level[part(module)]:
                wrong.append(f"{module} imports {imported}")
    return wrong


def test_every_part_has_a_place() -> None:
    placed = {name for layer in LAYERS for name in layer}
    parts = {name.split(".")[1] for name in MODULES if "." in name}
    assert parts == placed
    for package, layers in (
        ("runtime", RUNTIME_LAYERS),
        ("loading", LOADING_LAYERS),
        ("lab", LAB_LAYERS),
    ):
        names = [name.split(".") for name in MODULES if name.startswith(f"multirate.{package}.")]
        assert {name[2] for name in names} == {name for layer in layers for name in layer}


def test_imports_point_down() -> None:
    assert not upward(LAYERS, "multirate")
    assert not upward(RUNTIME_LAYERS, "multirate.runtime")
    assert not upward(LOADING_LAYERS, "multirate.loading")
    assert not upward(LAB_LAYERS, "multirate.lab")


def test_methods_know_no_backend() -> None:
    """They ask a decoder for what it can do: `drafting`, `text_steps`, `captured_rows`."""
    backends = ("multirate.runtime.native", "multirate.runtime.cuda")
    wrong = [
        f"{module} imports {imported}"
        for module, tree in MODULES.items()
        if module.startswith(("multirate.methods.", "multirate.training.", "multirate.decoding."))
        for imported, _ in imports(tree)
        if imported.startswith(backends)
    ]
    assert not wrong


def test_commands_load_the_lab_when_they_run() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, tree in MODULES.items()
        if not module.startswith("multirate.lab")
        for imported, at_start in imports(tree)
        if at_start and imported.startswith("multirate.lab")
    ]
    assert not wrong


MOST_LINES, MOST_OF_A_FUNCTION = 500, 80


def test_files_and_functions_are_short() -> None:
    long = set()
    for module, tree in MODULES.items():
        whole = max((node.end_lineno or 0 for node in tree.body), default=0)
        if whole > MOST_LINES:
            long.add(module)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min(one.lineno for one in (node, *node.decorator_list))
                if (node.end_lineno or 0) - first >= MOST_OF_A_FUNCTION:
                    long.add(f"{module}.{node.name}")
    assert not long


METHODS = ("multirate.methods", "multirate.lab.depth_baselines")
"""The packages with a folder for each method."""


def method_of(module: str) -> str:
    """The method whose folder `module` is in; "" for what is in none, or shared by several."""
    for package in METHODS:
        name = module.removeprefix(package + ".").split(".")[0]
        if module.startswith(package + ".") and name not in ("_shared", "spec"):
            return name
    return ""


def test_no_method_is_imported_by_another_or_from_outside() -> None:
    """A method is its folder: what methods share is in _shared and methods/spec.

    The expert engine runs the accelerated residual's own modules: it is no decoding method.
    """
    wrong = []
    for module, tree in MODULES.items():
        allowed = {"", method_of(module)}
        if module.startswith("multirate.experts."):
            allowed.add("m2r2_experts")
        wrong += [
            f"{module} imports {imported}"
            for imported, _ in imports(tree)
            if method_of(imported) not in allowed
        ]
    assert not wrong


def method_names() -> set[str]:
    """The names that folders register, but for plain decoding's, which is the baseline."""
    found = set()
    for module, tree in MODULES.items():
        if method_of(module) and module.endswith(".spec"):
            calls = [call for call in ast.walk(tree) if isinstance(call, ast.Call)]
            found |= {
                keyword.value.value
                for call in calls
                for keyword in call.keywords
                if keyword.arg == "name" and isinstance(keyword.value, ast.Constant)
            }
    return found


def test_no_code_outside_its_folder_names_a_method() -> None:
    names = method_names()
    assert {"kangaroo", "prompt_lookup", "medusa"} <= names
    wrong = [
        f"{module} has {node.value!r}"
        for module, tree in MODULES.items()
        if not module.startswith(METHODS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not wrong
    kernel = [path for path in (PACKAGE / "csrc").rglob("*") if path.suffix in (".c", ".h")]
    assert kernel and not [
        f"{path.name} has {name}"
        for path in kernel
        for name in names - {"free"}  # C's own function
        if re.search(rf"(?<![A-Za-z]){name}(?![A-Za-z])", path.read_text())
    ]


def assert_no_circle(graph: dict[str, set[str]]) -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join((*path[path.index(name) :], name))
        if name in done:
            return
        for other in graph[name]:
            if other != name:
                visit(other, (*path, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_no_import_circle() -> None:
    assert_no_circle(
        {
            name: {i for i, now in imports(tree) if now and i in MODULES}
            for name, tree in MODULES.items()
        }
    )


def kernel_units() -> dict[str, set[str]]:
    """Unit of the kernel (x.c with x.h) → those whose header it includes or whose functions x.c
    calls.
    """
    folder = PACKAGE / "csrc"
    units: dict[str, set[str]] = {}
    defined, called = {}, []
    for path in folder.rglob("*.[ch]"):
        unit, text = path.relative_to(folder).with_suffix("").as_posix(), path.read_text()
        known = units.setdefault(unit, set())
        for included in re.findall(r'^#include "(.+)\.[ch]"', text, re.M):
            known.add((path.parent / included).resolve().relative_to(folder).as_posix())
        if path.suffix == ".c":
            function = r"^(?!static|typedef)\w[\w *]*?\b(\w+)\([^;{]*\) \{"
            defined |= dict.fromkeys(re.findall(function, text, re.M), unit)
            called += [(unit, name) for name in re.findall(r"\b(\w+)\(", text)]
    for unit, name in called:
        units[unit] |= {defined[name]} if name in defined else set()
    return units


def test_no_circle_in_the_kernel() -> None:
    units = kernel_units()
    assert {"weights/format", "attention", "include/model"} <= set(units)
    assert "gemm" in units["layers"] and "layers" in units["passes"]
    assert_no_circle(units)


def test_what_scripts_import_exists() -> None:
    """Those in benchmarks/ and lab/recipes/, which no other test need run."""
    root = SOURCE.parent
    files = [*root.glob("benchmarks/*.py"), *root.glob("lab/recipes/*/*.py")]
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "multirate"
            ):
                continue
            assert node.module is not None
            module = importlib.import_module(node.module)
            for alias in node.names:
                known = hasattr(module, alias.name) or f"{node.module}.{alias.name}" in MODULES
                assert known, f"{file.name} imports {alias.name} from {node.module}"
