"""`pack`, then `generate --experts`: the text of the model in memory, within the memory that was
given.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lab.bench import tiny_model
from native_kernel import skip_without_kernel
from transformers import OlmoeConfig, OlmoeForCausalLM
from typer.testing import CliRunner, Result

from multirate.cli.main import app
from multirate.engine import attach
from multirate.errors import UserError
from multirate.experts.named_policies import POLICIES, parse_bytes
from multirate.experts.store import DATA
from multirate.lab.bench.expert_policies import ALL_POLICIES


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr, result.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("olmoe")
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=261,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        num_experts=8,
        num_experts_per_tok=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.2,
    )
    OlmoeForCausalLM(config).eval().save_pretrained(folder)
    tiny_model.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def store(model: Path) -> Path:
    result = run("pack", str(model), "--out", str(model / "store"))
    assert result.exit_code == 0, result.output
    assert "3 layers of 8 experts" in result.stdout
    return model / "store"


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "accelerated"])
def test_the_text_is_the_models(model: Path, store: Path, policy: str) -> None:
    arguments = ["generate", str(model), "--prompt", "hello", "-n", "12", "--stats"]
    whole = run(*arguments)
    part = run(
        *arguments, "--experts", str(store), "--expert-memory", "100KB", "--expert-policy", policy
    )
    assert whole.exit_code == part.exit_code == 0, part.output
    assert whole.stdout == part.stdout
    assert "experts: 0 MB" in part.stderr and "found in memory" in part.stderr


def test_quantised_experts(model: Path, tmp_path: Path) -> None:
    skip_without_kernel()
    arguments = ["pack", str(model), "--out", str(tmp_path / "s"), "--weights"]
    refused(run(*arguments, "q3"), "q3", "q8_0")
    refused(run(*arguments, "q4_0", "--layout", "module"), "layout module", "q4_0")
    packed = run(*arguments, "q4_0")
    assert packed.exit_code == 0 and "8 experts in Q4_0, 4 kB each" in packed.stdout
    texts = set()
    for memory in ("13KB", "1MB"):
        arguments = ["generate", str(model), "--prompt", "hello", "-n", "12", "--stats"]
        made = run(*arguments, "--experts", str(tmp_path / "s"), "--expert-memory", memory)
        assert made.exit_code == 0 and "MB of memory in Q4_0" in made.stderr, made.output
        texts.add(made.stdout)
    assert len(texts) == 1


def test_python(model: Path, store: Path) -> None:
    engine = attach(str(model), experts=store, expert_memory=100_000)
    assert engine.experts is not None and engine.experts.runtime is not None
    got = engine.generate([[5, 9, 30]], stop=engine.stopping(8)).sequences
    assert got == attach(str(model)).generate([[5, 9, 30]], stop=engine.stopping(8)).sequences
    assert engine.experts.runtime.memory_bytes <= 100_000
    engine.experts.remove()
    with pytest.raises(UserError, match="folder or hub id"):
        attach(object(), experts=store)


def test_what_is_refused(model: Path, store: Path, tmp_path: Path) -> None:
    generate = ["generate", str(model), "--prompt", "x", "--experts", str(store)]
    refused(run(*generate, "--expert-memory", "30KB"), "at least 3", "bytes")
    refused(run(*generate, "--expert-memory", "much"), "'much'", "2GB")
    refused(run(*generate, "--expert-policy", "magic"), "magic", "next_layer_gate")
    refused(run(*generate, "--dtype", "float32"), "--dtype")
    refused(run(*generate[:-1], str(tmp_path)), "experts.json")
    refused(
        run("generate", str(model), "--prompt", "x", "--expert-memory", "1GB"), "--experts FOLDER"
    )
    refused(run("generate", "--prompt", "x", "--experts", str(store)), "MODEL")
    refused(run("pack", str(tmp_path / "nowhere"), "--out", str(tmp_path)), "nowhere")
    dense = tiny_model.save(tmp_path / "dense")
    refused(run("pack", str(dense), "--out", str(tmp_path / "s")), "no experts")
    file = tmp_path / "file"
    file.write_text("")
    refused(run("pack", str(model), "--out", str(file)), "file")


def test_a_damaged_store_is_refused_before_generating(model: Path, tmp_path: Path) -> None:
    assert run("pack", str(model), "--out", str(tmp_path / "s")).exit_code == 0
    with (tmp_path / "s" / DATA).open("r+b") as data:
        data.seek(5000)
        data.write(b"??")
    result = run("generate", str(model), "--prompt", "x", "--experts", str(tmp_path / "s"))
    refused(result, "checksum", "pack it again")
    assert not result.stdout


def test_another_revision_is_refused(model: Path, store: Path, tmp_path: Path) -> None:
    other = OlmoeForCausalLM.from_pretrained(model)
    with torch.no_grad():
        other.model.norm.weight.add_(1)
    other.save_pretrained(tmp_path)
    tiny_model.tokenizer().save_pretrained(tmp_path)
    refused(
        run("generate", str(tmp_path), "--prompt", "x", "--experts", str(store)), "another revision"
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GB", 2 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5 g", 1_500_000_000),
        ("4096", 4096),
        (7, 7),
        (None, None),
    ],
)
def test_sizes(text: str | int | None, size: int | None) -> None:
    assert parse_bytes(text) == size


def test_the_index_names_what_was_packed(store: Path) -> None:
    index = json.loads((store / "experts.json").read_text())
    assert (index["num_experts"], index["top_k"], index["layers"], index["dtype"]) == (
        8,
        2,
        [0, 1, 2],
        "float32",
    )


def test_all_arms_in_one_command(model: Path, store: Path, tmp_path: Path) -> None:
    data = tmp_path / "q.jsonl"
    turns = [
        json.dumps({"question_id": i, "category": "c", "turns": ["hello there", "and then?"]})
        for i in (1, 2)
    ]
    data.write_text("\n".join(turns) + "\n")
    arguments = [
        "bench",
        str(model),
        "--data",
        str(data),
        "-n",
        "6",
        "--methods",
        "experts",
        "--experts",
        str(store),
    ]
    result = run(
        *arguments,
        "--expert-memory",
        "80KB,70%",
        "--repeats",
        "2",
        "--disk-speed",
        "200MB/s",
        "--json",
        str(tmp_path / "o.json"),
        "--html",
        str(tmp_path / "o.html"),
    )
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "o.json").read_text())
    assert [row["method"] for row in content["rows"]] == 2 * [
        arm for arm in ALL_POLICIES if arm != "accelerated"
    ]
    for row in content["rows"]:
        assert row["identical"] and row["tokens"] == 20 and row["seconds"] > 0
        assert row["bytes_per_token"] == 0 or row["method"] != "resident"
        assert row["bytes_per_token"] > 0 or row["method"] != "on_demand"
        assert row["hit_rate"] == 0 or row["method"] != "on_demand"
    assert content["disk_bytes_per_second"] == 200_000_000
    printed = [line for line in result.stdout.splitlines() if not line.startswith("page: ")]
    assert max(map(len, printed)) <= 80
    page = (tmp_path / "o.html").read_text()
    assert (
        page.count("<svg") == len(ALL_POLICIES) - 1
        and page.count("<table>") == 2
        and "belady" in page
    )
    refused(run(*arguments[:-2]), "--experts FOLDER")
    refused(run(*arguments, "--expert-memory", "1KB"), "at least 3")
    refused(run(*[a if a != "experts" else "experts,magic" for a in arguments]), "magic", "belady")


def test_a_trained_predictor(model: Path, store: Path, tmp_path: Path) -> None:
    """Trained on the tiny model: it fits that model only, and the text stays the same."""
    data = tmp_path / "d.jsonl"
    lines = [
        json.dumps({"instruction": f"say {i}", "output": "hello there " * 4}) for i in range(30)
    ]
    data.write_text("\n".join(lines) + "\n")
    out = tmp_path / "predictor"
    trained = run(
        "train",
        str(model),
        "--data",
        str(data),
        "--out",
        str(out),
        "--objective",
        "experts",
        "--steps",
        "12",
        "--tokens-per-batch",
        "256",
        "--max-length",
        "64",
        "--precision",
        "fp32",
        "--option",
        "rank=8",
    )
    assert trained.exit_code == 0, trained.output
    about = json.loads((out / "accelerator.json").read_text())
    assert about["method"] == "m2r2-experts"
    assert [(t["gate"], t["draft_step"]) for t in about["results"]["terms"]] == [
        (1, 1),
        (2, 1),
        (2, 2),
    ]
    assert about["results"]["terms"][0]["agreement"] > 0
    generate = ["generate", str(model), "--prompt", "hello", "-n", "12"]
    ahead = [
        *generate,
        "--experts",
        str(store),
        "--expert-memory",
        "100KB",
        "--expert-predictor",
        str(out),
    ]
    for policy in ("accelerated", "aot"):
        result = run(*ahead, "--expert-policy", policy)
        assert result.exit_code == 0, result.output
        assert result.stdout == run(*generate).stdout
    refused(
        run(*ahead[:-2], "--expert-policy", "accelerated"),
        "--objective experts",
        "--expert-predictor",
    )
    refused(
        run("train", str(model), "--data", str(data), "--out", str(out), "--objective", "x"),
        "tokens or experts",
    )
    dense = tiny_model.save(tmp_path / "dense")
    refused(
        run(
            "train",
            str(dense),
            "--data",
            str(data),
            "--out",
            str(tmp_path / "p"),
            "--objective",
            "experts",
        ),
        "mixtures of experts",
    )
