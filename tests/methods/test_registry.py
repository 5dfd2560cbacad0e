"""A method is its folder: what is added there, or by an installed package, is known everywhere."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from decoding.helpers import reference, tiny

import multirate
from multirate import methods
from multirate.decoding.stopping import StopSettings
from multirate.methods import spec

ECHO = """
from multirate.decoding.speculate.drafter import Draft, Drafter, Traits
from multirate.methods.spec import MethodSpec, register


class Echo(Drafter):
    traits = Traits(max_nodes=2)

    def draft(self, request):
        return [Draft.chain([token, token]) for token in request.last_tokens]


register(
    MethodSpec(
        name="echo",
        title="the last token again",
        summary="drafts the last token twice",
        drafter=lambda decoder, module, settings: Echo(),
    )
)
"""
SOURCE = Path(multirate.__file__).parent


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is forgotten after it."""
    spec.all_specs()
    monkeypatch.setattr(spec, "_SPECS", dict(spec._SPECS))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "echo" in name:
            del sys.modules[name]


def decodes_as_the_model() -> None:
    model, _ = tiny()
    engine = multirate.attach(model, backend="hf")
    assert "echo" in engine.methods()
    stop = StopSettings(max_new_tokens=20)
    out = engine.generate([[3, 7, 1]], stop=stop, method="echo", speculate="always")
    assert out.sequences == [reference(model, [3, 7, 1], 20)]
    assert out.stats.drafted > 0


def test_a_folder_is_enough(
    registry: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "echo"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "spec.py").write_text(ECHO)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    decodes_as_the_model()


def test_an_installed_package_is_enough(
    registry: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo_method.py").write_text(ECHO)
    installed = tmp_path / "echo_method-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-method\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[multirate.methods]\necho = echo_method\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    decodes_as_the_model()


@pytest.mark.parametrize("name", ["medusa", "hydra", "token_recycling"])
def test_no_other_module_names_the_method(name: str) -> None:
    folder = SOURCE / "methods" / name
    assert folder.is_dir()
    for path in SOURCE.rglob("*.py"):
        if folder not in path.parents:
            tree = ast.walk(ast.parse(path.read_text()))
            words = [node.value for node in tree if isinstance(node, ast.Constant)]
            assert name not in words, path
