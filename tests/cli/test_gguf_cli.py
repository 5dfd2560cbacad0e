"""GGUF files wherever a command takes a model."""

import json
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from loading.gguf import tiny_files
from typer.testing import CliRunner, Result

from multirate.cli.main import app


def run(*arguments: str) -> Result:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, (done.output, done.exception)
    return done


@pytest.mark.slow
def test_every_command_takes_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRATE_CACHE", str(tmp_path / "cache"))
    model = str(tiny_files.write(tmp_path / "m.gguf"))
    assert "LlamaForCausalLM" in run("info", model).stdout
    run("generate", model, "-p", "hi", "-n", "4")
    question = tmp_path / "question.jsonl"
    question.write_text(json.dumps({"question_id": 1, "category": "c", "turns": ["hi"]}) + "\n")
    shown = run(
        *("bench", model, "--suite", "mt_bench", "--data", str(question), "-n", "4"),
        *("--repeats", "1", "--methods", "autoregressive"),
    )
    assert "autoregressive" in shown.stdout
    texts, own = tmp_path / "texts.jsonl", tmp_path / "own.jsonl"
    sample = {"instruction": "hello", "output": "hello hello hello"}
    texts.write_text("".join(json.dumps(sample | {"instruction": f"{i}"}) + "\n" for i in range(4)))
    run("answers", model, "--data", str(texts), "--out", str(own), "--max-new-tokens", "4")
    out = tmp_path / "m2r2"
    run(
        *("train", model, "--data", str(texts), "--out", str(out), "--method", "m2r2"),
        *("--steps", "1", "--tokens-per-batch", "64", "--max-length", "32"),
    )
    assert json.loads((out / "accelerator.json").read_text())["base"]["name"] == "m.gguf"
    run("generate", model, "-p", "hi", "-n", "4", "-a", str(out), "--speculate", "always")
    mixture, store = str(tiny_files.write(tmp_path / "x.gguf", "mixtral")), str(tmp_path / "store")
    run("pack", mixture, "--out", store)
    run("generate", mixture, "--experts", store, "-p", "hi", "-n", "4")


def test_weights_are_named_and_wrong_ones_refused(tmp_path: Path) -> None:
    model = str(tiny_files.write(tmp_path / "m.gguf", kind=GGMLQuantizationType.Q8_0))
    shown = run("info", model).stdout
    assert "Q8_0 15 tensors, F32 5" in shown
    asked = ("generate", model, "-p", "hi", "-n", "4", "--stats")
    assert "weights Q8_0 15 tensors" in run(*asked).stderr
    assert "weights bfloat16" in run(*asked, "--weights", "bf16").stderr
    assert "weights bfloat16" in run(*asked, "--backend", "hf").stderr
    for given, words in (
        (("--weights", "q4_0"), "own quantisation"),
        (("--weights", "q3"), "accepted: file, bf16, q8_0, q4_0, q4_1"),
        (("--weights", "bf16", "--dtype", "float32"), "contradict each other"),
    ):
        done = CliRunner().invoke(app, [*asked, *given])
        assert done.exit_code == 2 and words in " ".join(done.stderr.split()), done.output
