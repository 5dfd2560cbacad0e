"""What the Python interface says of arguments that it cannot take: one sentence, never an error of
something inside.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.bench import tiny_model

import multirate
from multirate.engine import Engine, attach
from multirate.errors import UserError
from multirate.loading.hub import reference_accelerators
from multirate.methods.spec import all_specs, trainable, untrained_drafters


@pytest.fixture(scope="module")
def engine() -> Engine:
    return attach(tiny_model.model(), tokenizer=tiny_model.tokenizer())


@pytest.mark.parametrize("prompts", [[1, 2, 3], "hello", ["hello"], [[1.5, 2.0]], [[1, "2"]]])
def test_prompts_that_are_no_token_ids(engine: Engine, prompts: Any) -> None:
    with pytest.raises(
        UserError, match=r"^(the prompts are|prompt 0 is) .*accepted: lists of token ids"
    ):
        engine.generate(prompts)


@pytest.mark.parametrize("method", [None, "autoregressive", *untrained_drafters()])
def test_no_prompts_have_no_answers(engine: Engine, method: str | None) -> None:
    if method is not None and "two_model" in method:
        pytest.skip("it needs a second model")
    assert engine.generate([], method=method).sequences == []


@pytest.mark.parametrize(
    "arguments",
    [{"method": 5}, {"sampling": {"temperature": 1}}, {"stop": 5}, {"speculate": 1}, {"mode": 1}],
)
def test_arguments_of_another_type(engine: Engine, arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(UserError, match=f"{name} is "):
        engine.generate([[1, 2]], **arguments)


def test_models_and_accelerators_that_are_none(engine: Engine) -> None:
    for model in (None, 3):
        with pytest.raises(UserError, match=f"the model is {model}; accepted"):
            attach(model)
    with pytest.raises(UserError, match="the accelerator is 5; accepted"):
        attach(engine.model, 5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="the accelerator is 5; accepted"):
        engine.model.generate(
            torch.tensor([[1, 2]]),
            custom_generate=multirate.custom_generate(5),  # type: ignore[arg-type]
        )
    with pytest.raises(
        UserError, match="expert_memory is '2GB', but the model has no experts on disk"
    ):
        attach(engine.model, expert_memory="2GB")


def test_an_unknown_method_is_told_all_that_there_are() -> None:
    """Those that are attached, and those that an accelerator of the package or another one adds."""
    engine = attach("tiny", backend="hf")
    first, *others = reference_accelerators("tiny")
    assert others
    engine.add(first)

    def said(method: str) -> list[list[str]]:
        with pytest.raises(UserError, match=f"method '{method}' cannot be used") as caught:
            engine.generate([[1, 2]], method=method)
        lists = str(caught.value).split("; ")[1:]
        return [names.rpartition(": ")[2].split(", ") for names in lists]

    accepted, ours, theirs = said("magic")
    assert accepted == engine.methods() and first in accepted and ours == others
    *trained, predictor = sorted(trainable(), key=lambda name: all_specs()[name].role == "experts")
    assert sorted([first, *ours, *theirs]) == sorted(trained)
    for name, lacking in ((theirs[0], "none is attached"), (predictor, "does not decode text")):
        with pytest.raises(UserError, match=lacking):
            engine.generate([[1, 2]], method=name)


def test_two_accelerators_of_one_name(engine: Engine, tmp_path: Path) -> None:
    from multirate.cli.options import add_accelerators

    class Named:
        def __init__(self) -> None:
            self.accelerators: dict[str, str] = {}

        def add(self, folder: str, name: str | None) -> str:
            self.accelerators[name or "m2r2"] = folder
            return name or "m2r2"

    one = Named()
    add_accelerators(one, ["a=x", "y"], [], {})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"two accelerators are named m2r2: .*NAME=FOLDER"):
        add_accelerators(one, ["z"], [], {})  # type: ignore[arg-type]


def test_an_engine_is_not_copied(engine: Engine) -> None:
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(UserError, match="attach on the copy"):
            attempt(engine)
    model = copy.deepcopy(engine.model)
    assert attach(model).generate([[5, 6]]).sequences == engine.generate([[5, 6]]).sequences


def test_a_compiled_model_is_attached_to_without_compiling(engine: Engine) -> None:
    """In place, or around it."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("compiled")

    expected = engine.generate([[5, 6]]).sequences
    around = torch.compile(copy.deepcopy(engine.model), backend=refuse)
    within = copy.deepcopy(engine.model)
    within.compile(backend=refuse)
    for model in (around, within):
        assert attach(model).generate([[5, 6]]).sequences == expected
