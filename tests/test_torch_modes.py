"""What torch is set to, by the caller, another thread or the process, changes no result; and a call
leaves nothing behind that only its own modes allow.
"""

from __future__ import annotations

import ast
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import multirate
from multirate.engine import Engine
from multirate.errors import UserError
from multirate.loading.hub import load_model, reference_accelerators
from multirate.methods._shared.shape import BaseShape
from multirate.methods.spec import find_training, trainable
from multirate.runtime.hf.empty import empty_model
from multirate.torch_modes import Modes, building, own_modes

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "multirate"
METHODS = ("autoregressive", "m2r2-carry", "kangaroo", "prompt_lookup")
PROMPT = [3, 50, 70, 9, 3, 50, 70]
LATER = [8, 41, 66, 8, 41]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta device": lambda: torch.device("meta"),
    "inference mode": lambda: torch.inference_mode(),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@cache
def sources() -> list[tuple[str, ast.AST]]:
    """(file, each node of its syntax tree)."""
    return [
        (path.relative_to(PACKAGE).as_posix(), node)
        for path in sorted(PACKAGE.rglob("*.py"))
        if "reference" not in path.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]


_FLOATING = {"empty", "zeros", "ones", "full", "rand", "randn", "linspace", "eye", "tensor"}
_WHOLE = {"arange", "as_tensor", "randint", "randperm", "Generator"}  # or of their argument's dtype


def test_every_new_tensor_states_its_dtype_and_device() -> None:
    """Modules (modules.py, layers.py, arla.py) are made within `building`, which does."""
    missing = []
    for file, node in sources():
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != "torch":
            continue
        name, given = node.func.attr, {one.arg for one in node.keywords}
        needed = {"dtype", "device"} if name in _FLOATING else set()
        needed |= {"device"} if name in _WHOLE else set()
        built = file.startswith(("methods/", "lab/depth_baselines/")) and file.endswith(
            ("modules.py", "layers.py")
        )
        if needed - given and not built and file != "methods/m2r2/arla.py":
            missing.append(f"{file}:{node.lineno} {ast.unparse(node)}")
    assert not missing


def test_addresses_and_versions_are_read_in_one_place_each() -> None:
    allowed = {
        "data_ptr": {"runtime/native/abi.py", "runtime/weight_watch.py", "integration/engines.py"},
        "_version": {"runtime/weight_watch.py"},
    }
    wrong = []
    for file, node in sources():
        if isinstance(node, ast.Attribute) and file not in allowed.get(node.attr, {file}):
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            if not own:
                wrong.append(f"{file}:{node.lineno} {ast.unparse(node)}")
    assert not wrong


def test_nothing_sets_what_all_threads_see() -> None:
    names = {
        "init_empty_weights",
        "init_on_device",
        "set_default_dtype",
        "set_default_device",
        "set_default_tensor_type",
        "use_deterministic_algorithms",
    }
    wrong = [
        f"{file}:{node.lineno}"
        for file, node in sources()
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and names & {one.name for one in node.names})
    ]
    assert not wrong


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def loaded(request: pytest.FixtureRequest) -> Any:
    """The kernel's model, and one that its own layers run."""
    return load_model("tiny", dtype=request.param)


def attached(loaded: Any) -> Engine:
    engine = multirate.attach(loaded)
    for name in ("m2r2-carry", "kangaroo"):
        engine.add(reference_accelerators("tiny")[name])
    return engine


def texts(engine: Engine, prompt: list[int] = PROMPT) -> list[list[list[int]]]:
    settings = (
        multirate.SamplingSettings(),
        multirate.SamplingSettings(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=3),
    )
    return [
        engine.generate(
            [prompt], one, engine.stopping(8), method=method, speculate="always"
        ).sequences
        for method in METHODS
        for one in settings
    ]


@pytest.mark.parametrize("state", STATES)
def test_text_does_not_depend_on_what_torch_is_set_to(loaded: Any, state: str) -> None:
    """Nor does that of the next call, which goes on with what this one has left."""
    want = texts(attached(loaded)), texts(attached(loaded), LATER)
    with STATES[state]():
        engine = attached(loaded)
        first = texts(engine)
    assert (first, texts(engine, LATER)) == want


def test_another_thread_loads_in_another_dtype(loaded: Any) -> None:
    """As from_pretrained(dtype=bfloat16) does: the default is the process's."""
    engine = attached(loaded)
    want, over = texts(engine), threading.Event()

    def flip() -> None:
        while not over.is_set():
            with default_dtype(torch.float64):
                over.wait(1e-4)

    other = threading.Thread(target=flip)
    other.start()
    try:
        engine.forget()
        got = texts(engine)
    finally:
        over.set()
        other.join()
    assert got == want


@pytest.mark.parametrize("state", STATES)
def test_models_are_loaded_alike(state: str) -> None:
    want = load_model("tiny").model
    with STATES[state]():
        got = load_model("tiny").model
    assert not any(one.is_inference() for one in got.parameters())
    for name, one in want.state_dict().items():
        assert one.equal(got.state_dict()[name])
    for name, one in want.named_buffers():
        assert one.dtype == dict(got.named_buffers())[name].dtype


@pytest.mark.parametrize("state", STATES)
def test_modules_are_built_alike(state: str) -> None:
    shape = BaseShape.of(load_model("tiny").model.config)
    for name in ("kangaroo", "m2r2-carry", "specee", "calm-classifier"):
        assert name in trainable()
        training = find_training(name)
        made = []
        for around in (torch.enable_grad, STATES[state]):
            with torch.random.fork_rng([]), around():
                torch.manual_seed(0)
                made.append(training.build(training.config_for(shape), shape).state_dict())
        assert all(value.equal(made[1][key]) for key, value in made[0].items()), name
        assert not any(value.is_inference() for value in made[1].values())


def test_callbacks_have_the_callers_modes() -> None:
    engine = multirate.attach("tiny")
    seen: list[Modes] = []
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16):
        noted = torch.zeros(1, dtype=torch.int64)

        def note(_: int, tokens: list[int]) -> None:
            noted[0] = tokens[-1]  # a tensor of inference mode takes no writes outside of it
            seen.append(Modes.now())

        now = Modes.now()
        engine.generate([PROMPT], stop=engine.stopping(3), on_tokens=note)
        assert Modes.now() == now
    assert seen and all(one == now for one in seen)


def test_own_modes_end_with_their_block() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        before = Modes.now()
        with pytest.raises(ZeroDivisionError), own_modes():
            assert Modes.now() == Modes()
            1 / 0  # noqa: B018
        assert Modes.now() == before


def test_an_empty_model_is_the_models_own_class_without_memory() -> None:
    full = load_model("tiny").model
    with default_dtype(torch.float64):
        empty = empty_model(full.config, torch.bfloat16)
    assert type(empty) is type(full)
    assert all(one.is_meta and one.dtype == torch.bfloat16 for one in empty.parameters())
    own = dict(full.named_buffers())
    for name, one in empty.named_buffers():
        assert one.equal(own[name]) and one.dtype == own[name].dtype
    assert empty.config.dtype == torch.bfloat16


def test_building_an_empty_model_changes_nothing_for_other_threads() -> None:
    made: list[nn.Module] = []
    config = load_model("tiny").model.config
    inside, over = threading.Event(), threading.Event()

    class Slow(nn.Linear):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            inside.set()
            over.wait(10)
            super().__init__(*arguments, **more)

    def build() -> None:
        with building(torch.bfloat16, empty_on_meta=True):
            made.append(Slow(2, 3))
        empty_model(config, torch.bfloat16)

    other = threading.Thread(target=build)
    other.start()
    assert inside.wait(10)
    mine = nn.Linear(2, 3)
    over.set()
    other.join()
    assert mine.weight.dtype == torch.float32 and not mine.weight.is_meta
    assert made[0].weight.is_meta and made[0].weight.dtype == torch.bfloat16


@pytest.fixture
def prepared() -> dict[str, Any]:
    return {"inputs": torch.tensor([PROMPT]), "max_new_tokens": 8, "do_sample": False}


def test_a_model_made_in_inference_mode(prepared: dict[str, Any]) -> None:
    import transformers

    torch.manual_seed(0)  # of random weights, whose logits may be as good as equal
    with torch.inference_mode():
        model = transformers.AutoModelForCausalLM.from_config(load_model("tiny").model.config)
    model.eval()
    want = model.generate(**prepared)
    for _ in range(2):
        assert want.equal(model.generate(**prepared, custom_generate=multirate.custom_generate()))
    with pytest.raises(UserError, match="inference_mode"):
        multirate.train(model, [], "unused", tokenizer=object())


def test_autocast_in_another_dtype_is_the_models_own_loop(prepared: dict[str, Any]) -> None:
    model = load_model("tiny", dtype="float32").model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = model.generate(**prepared)
        with pytest.warns(UserWarning, match=r"torch.autocast in torch.bfloat16"):
            got = model.generate(**prepared, custom_generate=multirate.custom_generate())
    assert want.equal(got)
    model.bfloat16()  # whose products are those of autocast
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(**prepared, custom_generate=multirate.custom_generate())
