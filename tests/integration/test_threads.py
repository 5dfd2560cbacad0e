"""Engines in several threads: their answers are those of one thread."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import multirate
from multirate.engine import Engine, attach
from multirate.errors import UserError
from multirate.loading.hub import load_model, reference_accelerators

METHODS = ["autoregressive", "m2r2-carry", "prompt_lookup", "kangaroo"]
NEW_TOKENS = 12
SETTLED = 60.0  # seconds after which a thread or process counts as hanging


@pytest.fixture(scope="module", params=["native", "hf"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(backend: str) -> Any:
    """In fp32 for the model's own layers: in bf16 their rounding depends on what shares a pass."""
    return load_model("tiny", dtype="bfloat16" if backend == "native" else "float32").model


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Engines with more threads than cores wait for each other all the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompts(model: Any, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in torch.randint(8, 40, (count,), generator=generator).tolist():
        some = torch.randint(5, model.config.vocab_size, (length,), generator=generator).tolist()
        made.append(some + some[: length // 2])  # something to look up
    return made


def engine(model: Any, backend: str) -> Engine:
    made = attach(model, backend=backend)
    for name in ("m2r2-carry", "kangaroo"):
        made.add(reference_accelerators("tiny")[name])
    return made


def answer(made: Engine, prompt: list[int], method: str) -> list[int]:
    stop = made.stopping(NEW_TOKENS)
    return made.generate([prompt], stop=stop, method=method, speculate="always").sequences[0]


def side_by_side(works: list[Callable[[], Any]], threads: int) -> list[Any]:
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work) for work in works]
        return [future.result(SETTLED) for future in futures]


@pytest.mark.parametrize(
    ("torch_threads", "method"), [*((1, method) for method in METHODS), (2, "m2r2-carry")]
)
def test_two_engines_in_two_threads(
    model: Any, backend: str, method: str, torch_threads: int
) -> None:
    torch.set_num_threads(torch_threads)
    asked = prompts(model, 6 if backend == "native" and torch_threads == 1 else 2)
    engines = [engine(model, backend), engine(model, backend)]
    expected = [answer(engines[0], prompt, method) for prompt in asked]

    def all_of(one: Engine) -> list[list[int]]:
        return [answer(one, prompt, method) for prompt in asked]

    assert side_by_side([lambda e=e: all_of(e) for e in engines], 2) == [expected, expected]


@pytest.mark.parametrize("method", METHODS)
def test_one_engine_in_several_threads(model: Any, backend: str, method: str) -> None:
    asked = prompts(model, 4 if backend == "native" else 2)
    one = engine(model, backend)
    expected = [answer(one, prompt, method) for prompt in asked]
    found = side_by_side([lambda p=p: answer(one, p, method) for p in asked * 2], 4)
    assert found == expected * 2


@pytest.mark.parametrize("name", [None, "m2r2-carry", "kangaroo"])
def test_custom_generate_from_two_threads(model: Any, backend: str, name: str | None) -> None:
    """From the first call on, which packs the weights."""
    own = copy.deepcopy(model)
    accelerator = None if name is None else str(reference_accelerators("tiny")[name])
    ours = multirate.custom_generate(accelerator, backend=backend, speculate="always")
    asked = [torch.tensor([prompt]) for prompt in prompts(own, 3)]

    def generate(ids: torch.Tensor, **options: Any) -> list[int]:
        return own.generate(ids, do_sample=False, max_new_tokens=16, **options)[0].tolist()

    found = side_by_side([lambda i=i: generate(i, custom_generate=ours) for i in asked], 2)
    assert found == [generate(ids, custom_generate=ours) for ids in asked]


def test_the_models_own_generate_beside_adapters_on_its_layers() -> None:
    """The adapters hang on the model's own modules for as long as a draft runs."""
    own = load_model("tiny", dtype="float32").model
    asked = prompts(own, 3)
    one = engine(own, "hf")

    def plain() -> list[list[int]]:
        return [
            own.generate(torch.tensor([p]), do_sample=False, max_new_tokens=16)[0].tolist()
            for p in asked
        ]

    expected = plain()
    running = threading.Event()

    def drafts() -> None:
        while not running.is_set():
            answer(one, asked[0], "m2r2-carry")

    with ThreadPoolExecutor(1) as pool:
        drafting = pool.submit(drafts)
        try:
            assert [plain() for _ in range(3)] == [expected] * 3
        finally:
            running.set()
            drafting.result(SETTLED)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_generation_that_breaks_off_gives_its_turn_back(
    model: Any, backend: str, error: type[BaseException]
) -> None:
    one = engine(model, backend)
    prompt = prompts(model, 1)[0]
    expected = answer(one, prompt, "m2r2-carry")

    def break_off(_: int, tokens: list[int]) -> None:
        raise error

    with pytest.raises(error):
        one.generate([prompt], method="m2r2-carry", on_tokens=break_off)
    assert side_by_side([lambda: answer(one, prompt, "m2r2-carry")], 1) == [expected]


def test_a_generation_within_a_generation_is_refused(model: Any, backend: str) -> None:
    one = engine(model, backend)
    prompt = prompts(model, 1)[0]
    with pytest.raises(UserError, match="second engine"):
        one.generate([prompt], on_tokens=lambda *_: answer(one, prompt, "autoregressive") and None)
    assert answer(one, prompt, "autoregressive")


def in_child(work: Callable[[], bool]) -> bool:
    """Whether `work` returns true in a forked process."""
    child = os.fork()
    if child == 0:
        done = False
        try:
            done = work()
        finally:
            os._exit(0 if done else 1)
    until = time.monotonic() + SETTLED
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status == 0
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the forked process hangs")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", METHODS)
def test_a_forked_process_goes_on_with_the_engine(model: Any, backend: str, method: str) -> None:
    torch.set_num_threads(2)
    one = engine(model, backend)
    prompt = prompts(model, 1)[0]
    large = torch.ones(1000, 1000)
    large @ large  # OpenMP has threads now, which fork does not copy
    expected = answer(one, prompt, method)
    assert in_child(lambda: answer(one, prompt, method) == expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_fork_while_another_thread_generates(model: Any, backend: str) -> None:
    one = engine(model, backend)
    prompt = prompts(model, 1)[0]
    expected = answer(one, prompt, "m2r2-carry")
    inside, forked = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        forked.wait(SETTLED)

    with ThreadPoolExecutor(1) as pool:
        generation = pool.submit(
            one.generate, [prompt], method="m2r2-carry", on_tokens=wait, speculate="always"
        )
        assert inside.wait(SETTLED)
        try:
            assert in_child(lambda: answer(one, prompt, "m2r2-carry") == expected)
        finally:
            forked.set()
        generation.result(SETTLED)
