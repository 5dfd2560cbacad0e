"""A saved accelerator's folder as `custom_generate`. The accelerators are untrained: their drafts
are mostly wrong.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.bench import tiny_model
from transformers import TextStreamer

import multirate
from multirate.decoding.speculate.budget import BudgetPolicy
from multirate.decoding.speculate.costs import CostModel, measure_costs
from multirate.decoding.speculate.step_costs import StepCosts
from multirate.errors import Notice
from multirate.methods._shared.shape import BaseShape
from multirate.methods.spec import find_training
from multirate.training.checkpoint import Accelerator, describe_base
from multirate.training.custom_generate_loader import write_custom_generate


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model.model()


def make(model: Any, method: str, folder: Path) -> Path:
    torch.manual_seed(0)
    kind = find_training(method)
    shape = BaseShape.of(model.config)
    config = kind.config_for(shape)
    accelerator = Accelerator(method, config, kind.build(config, shape), describe_base(model))
    accelerator.save_pretrained(folder)
    write_custom_generate(folder)
    return folder


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(model, "m2r2-carry", tmp_path_factory.mktemp("accelerator"))


def prompt() -> torch.Tensor:
    return torch.tensor([[100, 7, 45, 230]])


def test_the_folder_alone_speeds_up_generate(
    model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from multirate.engine import Engine

    used = []
    right = Engine.generate

    def seen(self: Engine, *arguments: Any, **named: Any) -> Any:
        output = right(self, *arguments, **named)
        used.append(output.stats.drafted)
        return output

    monkeypatch.setattr(Engine, "generate", seen)
    options = {"do_sample": False, "max_new_tokens": 16}
    expected = model.generate(prompt(), **options)
    named = {
        "custom_generate": str(folder),
        "trust_remote_code": True,
        "speculate": "always",
        "backend": "hf",
    }
    assert torch.equal(model.generate(prompt(), **options, **named), expected)
    ids, mask = torch.tensor([[0, 0, 9, 8], [5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1], [1] * 4])
    batch = {"input_ids": ids, "attention_mask": mask}
    assert torch.equal(
        model.generate(**batch, **options, **named), model.generate(**batch, **options)
    )
    assert len(used) == 2 and all(used)  # the accelerator drafted
    monkeypatch.chdir(folder.parent)
    named["custom_generate"] = f"./{folder.name}"
    assert torch.equal(model.generate(prompt(), **options, **named), expected)


def test_streamer_and_stop_strings_through_the_folder(
    model: Any, folder: Path, capsys: Any
) -> None:
    words = tiny_model.tokenizer()
    options = {"do_sample": False, "max_new_tokens": 40}
    named = {
        "custom_generate": str(folder),
        "trust_remote_code": True,
        "speculate": "always",
        "backend": "hf",
    }
    printed = []
    for extra in ({}, named):
        model.generate(prompt(), **options, streamer=TextStreamer(words, skip_prompt=True), **extra)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and printed[0].strip()
    letters = [words.decode([t]) for t in model.generate(prompt(), **options)[0, 8:]]
    stop = next(letter for letter in letters if letter.isascii() and letter.isprintable())
    expected = model.generate(prompt(), **options, stop_strings=[stop], tokenizer=words)
    got = model.generate(prompt(), **options, stop_strings=[stop], tokenizer=words, **named)
    assert torch.equal(got, expected) and got.shape[1] < 44
    with pytest.raises(multirate.UserError, match="stop_strings need"):
        model.generate(prompt(), stop_strings=[stop], **named)


def test_trust_and_the_right_base_are_needed(model: Any, folder: Path) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(prompt(), custom_generate=str(folder), trust_remote_code=False)
    other = tiny_model.model(num_hidden_layers=3)
    with pytest.warns(UserWarning, match="own generate: .*num_layers 3 instead of 4"):
        got = other.generate(prompt(), custom_generate=str(folder), trust_remote_code=True)
    assert got.equal(other.generate(prompt()))


def test_a_relative_of_the_base_is_measured_and_said_once(folder: Path) -> None:
    other, words = tiny_model.model(seed=9), tiny_model.tokenizer()
    expected = other.generate(prompt(), do_sample=False, max_new_tokens=12)[0, 4:].tolist()
    engine = multirate.attach(other, folder, backend="hf", tokenizer=words)
    with pytest.warns(Notice, match=r"other weights.*on . short texts.* tokens per step") as said:
        for _ in range(2):
            output = engine.generate(
                [prompt()[0].tolist()], stop=engine.stopping(12), speculate="always"
            )
            assert output.sequences == [expected] and output.stats.drafted > 0
    assert len([one for one in said if "other weights" in str(one.message)]) == 1


def test_a_relative_without_a_tokenizer_is_said_too(model: Any, tmp_path: Path) -> None:
    other = tiny_model.model(seed=8)
    engine = multirate.attach(other, make(model, "m2r2", tmp_path), backend="hf")
    expected = other.generate(prompt(), do_sample=False, max_new_tokens=12)[0, 4:].tolist()
    with pytest.warns(Notice, match="other weights.*fewer of its drafts"):
        output = engine.generate([prompt()[0].tolist()], stop=engine.stopping(12))
    assert output.sequences == [expected]


def test_what_is_measured_on_a_relative_counts_and_the_card_does_not(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card that claims much, on a base where nothing is accepted: what is said is what was
    measured, and most steps are plain.
    """
    card = make(model, "m2r2-carry", tmp_path) / "accelerator.json"
    described = json.loads(card.read_text())
    described["results"] = {"terms": [{"gate": 1, "draft_step": 1, "agreement": 0.99}]}
    card.write_text(json.dumps(described))
    monkeypatch.setattr(
        "multirate.decoding.speculate.trial.SECONDS", 1e9
    )  # all texts, also when it is slow
    # what is decided depends on no clock: this machine may be busy with other things
    costs = CostModel(StepCosts(1.0, {1: 1.0, 16: 2.0}, 0.1, 0.05))
    monkeypatch.setattr("multirate.decoding.speculate.drafter.measure_costs", lambda *_: costs)
    untimed = functools.partial(BudgetPolicy, timed=False)
    monkeypatch.setattr("multirate.methods._shared.draft_choice.BudgetPolicy", untimed)
    other = tiny_model.model(seed=7)
    engine = multirate.attach(other, tmp_path, backend="hf", tokenizer=tiny_model.tokenizer())
    with pytest.warns(Notice, match=r"other weights.* it gives 1\.[01]\d tokens per step"):
        output = engine.generate([prompt()[0].tolist()], stop=engine.stopping(24))
    assert output.stats.drafted < output.stats.tokens // 2


@pytest.mark.parametrize("method", ["m2r2", "m2r2-carry", "kangaroo"])
def test_attach_by_folder_and_by_object(model: Any, method: str, tmp_path: Path) -> None:
    folder = make(model, method, tmp_path)
    expected = model.generate(prompt(), do_sample=False, max_new_tokens=12)[0, 4:].tolist()
    for accelerator in (folder, str(folder), Accelerator.from_pretrained(folder, model)):
        engine = multirate.attach(model, accelerator, backend="hf")
        assert engine.default == method and method in engine.methods() and engine.lossless(method)
        output = engine.generate(
            [prompt()[0].tolist()], stop=engine.stopping(12), speculate="always"
        )
        assert output.sequences == [expected] and output.stats.drafted > 0
        plain = engine.generate([prompt()[0].tolist()], stop=engine.stopping(12), speculate="never")
        assert plain.sequences == [expected] and plain.stats.drafted == 0
    assert engine.add(folder, "mine") == "mine" and engine.default == method
    with pytest.raises(multirate.UserError, match="a baseline has that name"):
        engine.add(folder, "generate")


def attach_with_card(model: Any, folder: Path, *agreement: float) -> multirate.Engine:
    """The accelerator, whose card says how often drafts agreed at each draft step."""
    accelerator = Accelerator.from_pretrained(folder, model)
    accelerator.results["terms"] = [
        {"gate": 1, "draft_step": step, "agreement": each} for step, each in enumerate(agreement, 1)
    ]
    return multirate.attach(model, accelerator, backend="hf")


@pytest.mark.parametrize(("draft_step", "pays"), [(0.02, False), (0.0001, True)])
def test_auto_decodes_plainly_where_drafts_do_not_pay_and_says_so(
    model: Any, folder: Path, draft_step: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With costs given instead of measured: on a busy machine measured ones would decide by
    chance.
    """
    engine = attach_with_card(model, folder, 0.6, 0.6, 0.6)
    speculation = engine._steps.of("m2r2-carry")
    assert speculation is not None
    rates = speculation.acceptance.rates()
    assert isinstance(rates, list) and rates[:3] == [0.6] * 3
    costs = CostModel(StepCosts(0.01, {1: 0.01, 16: 0.011}, draft_step, draft_step))
    monkeypatch.setattr("multirate.decoding.speculate.drafter.measure_costs", lambda *_: costs)
    expected = model.generate(prompt(), do_sample=False, max_new_tokens=6)[0, 4:].tolist()
    own = "m2r2-carry:lookup=0"
    output = engine.generate([prompt()[0].tolist()], stop=engine.stopping(6), method=own)
    assert output.sequences == [expected]
    if pays:
        assert output.stats.drafted > 0 and engine.notice is None
    else:
        assert output.stats.drafted == 0
        assert engine.notice is not None and "drafting is not faster here" in engine.notice
        forced = engine.generate(
            [prompt()[0].tolist()], stop=engine.stopping(6), method=own, speculate="always"
        )
        assert forced.stats.drafted > 0 and engine.notice is None


def test_auto_drafts_from_the_text_where_own_drafts_cannot_pay(
    model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = attach_with_card(model, folder, 0.6)
    # a level of an own draft takes longer than twenty plain steps, a row of the text's nothing
    costs = CostModel(StepCosts(0.01, {1: 0.01, 16: 0.01}, 0.2, 0.2))
    monkeypatch.setattr("multirate.decoding.speculate.drafter.measure_costs", lambda *_: costs)

    def own_drafts(*_: Any, **__: Any) -> Any:
        raise AssertionError("own drafts were made")

    repeating = [5, 6, 7, 8] * 6
    expected = engine.generate([repeating], stop=engine.stopping(48), speculate="never").sequences
    speculation = engine._steps.of("m2r2-carry")
    assert speculation is not None
    monkeypatch.setattr(speculation.step.drafter._grower, "grow", own_drafts)  # type: ignore[attr-defined]
    output = engine.generate([repeating], stop=engine.stopping(48))
    assert engine.used == "m2r2-carry" and engine.notice is None
    assert output.sequences == expected
    assert output.stats.drafted > 0, "no continuation was drafted"


def test_costs_are_measured_on_first_use(
    model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = attach_with_card(model, folder, 0.5)
    measured = []

    def recorded(*arguments: Any) -> CostModel:
        measured.append(measure_costs(*arguments))
        return measured[-1]

    monkeypatch.setattr("multirate.decoding.speculate.drafter.measure_costs", recorded)
    for _ in range(2):
        engine.generate([prompt()[0].tolist()], stop=engine.stopping(2))
    assert len(measured) == 1, "once"
    assert measured[0].costs.plain_step > 0 and measured[0].costs.draft_step > 0
