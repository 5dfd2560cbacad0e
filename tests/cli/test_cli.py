import importlib.util
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from lab.bench import tiny_model
from lab_files import MIXTURE
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import multirate
from multirate.cli import options
from multirate.cli.bench import method_names
from multirate.cli.main import app
from multirate.engine import attach
from multirate.loading.hub import reference_accelerators
from multirate.methods.spec import untrained_drafters
from multirate.methods.token_recycling.decode import TokenRecyclingDrafter

DRAFTING = ("--method", "layerskip:confidence=0", "--speculate", "always")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model.save(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "question.jsonl"
    path.write_text(
        json.dumps({"question_id": 1, "category": "c", "turns": ["hello there", "and then?"]})
        + "\n"
        + json.dumps({"question_id": 2, "category": "c", "turns": ["what"]})
        + "\n"
    )
    return str(path)


def run(*arguments: str, text: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=text)


def refused(result: Result, *parts: str) -> None:
    """One sentence on stderr, code 2, nothing on stdout, no traceback."""
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.output
    for part in parts:
        assert part in result.stderr, result.stderr


def plain_answer(count: int = 12, prompt: str = "hi") -> str:
    network, words = tiny_model.model(), tiny_model.tokenizer()
    ids = words.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    new = network.generate(**ids, do_sample=False, max_new_tokens=count)[
        0, ids["input_ids"].shape[1] :
    ]
    return words.decode(new, skip_special_tokens=True)


def test_version_and_help() -> None:
    shown = run("--version").stdout.splitlines()
    assert shown[0].startswith(f"multirate {multirate.__version__} ") and len(shown) == 3
    assert f"torch {torch.__version__}" in shown[1]
    assert shown[2].startswith("native kernel: ")
    for command in ("generate", "train", "bench", "demo", "info"):
        assert run(command, "--help").exit_code == 0
    assert run("generate", "--no-such-option").exit_code == 2


def test_help_is_grouped_and_fits_in_80_columns() -> None:
    """No summary of a command is cut, and the page without arguments is the one of --help."""
    bare, asked = run(), run("--help")
    assert bare.exit_code == 2 and asked.exit_code == 0
    assert bare.output.strip() == asked.output.strip()
    groups = ("Start here:", "Use:", "Train:", "Measure:", "Research and experts:")
    places = [asked.stdout.index(f"\n{group}\n") for group in groups]
    assert places == sorted(places) and "..." not in asked.stdout.partition("Start here")[2]
    text = run("generate", "--help").stdout
    first, *others = text.partition("\nOptions:\n")[2].split("\n\n")
    assert first.count("\n  -") + 1 == 9  # eight and --help
    assert {"Sampling:", "Hardware:"} <= {part.strip().splitlines()[0] for part in others}
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        shown = run(name, "--help").stdout.splitlines()
        assert max(map(len, shown)) <= 80, shown


def test_methods_and_their_settings_are_listed() -> None:
    from multirate.methods._shared.described import decoding_settings, training_settings
    from multirate.methods.spec import all_specs

    listed = run("methods").stdout
    for name, method in all_specs().items():
        assert name in listed
        shown = run("methods", name)
        assert shown.exit_code == 0, shown.output
        for one in (*decoding_settings(method), *training_settings(method)):
            assert one.name in shown.stdout and one.help and one.accepted and one.default
    refused(run("methods", "magic"), "magic")


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, multirate.cli.main; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("method", ["autoregressive", "layerskip", "prompt_lookup"])
@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_generate_writes_what_transformers_writes(model: str, method: str, stream: str) -> None:
    result = run(
        "generate",
        model,
        "-p",
        "hi",
        "-n",
        "12",
        "--method",
        method,
        stream,
        "--speculate",
        "always",
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == plain_answer() + "\n"


def test_a_second_model_drafts_where_it_has_the_same_tokenizer(model: str, tmp_path: Path) -> None:
    options = ("-p", "hi", "-n", "12", "--speculate", "always", "--method")
    result = run("generate", model, *options, f"two_model:draft={model}")
    assert result.stdout == plain_answer() + "\n", result.output
    refused(run("generate", model, *options, "two_model"), "two_model:draft=MODEL")
    words = tiny_model.tokenizer()
    words.add_tokens(["hello"])
    tiny_model.model().save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    refused(
        run("generate", model, *options, f"two_model:draft={tmp_path}"),
        "has another tokenizer than the base model: token 'hello' is number 261 there",
    )


def test_drafts_are_copied_from_given_texts(model: str, tmp_path: Path) -> None:
    """The text stays the model's, in fewer steps where the texts say what it says."""
    data, texts = tmp_path / "own.jsonl", tmp_path / "texts.safetensors"
    answer = plain_answer(40)
    data.write_text(json.dumps({"instruction": "hi", "output": answer}) + "\n")
    options = ("--data", str(data), "--out", str(texts))
    refused(run("texts", model, "--data", str(tmp_path / "none"), "--out", str(texts)), "none")
    refused(run("texts", model, "--data", str(data), "--out", "/no/such/texts"), "/no/such")
    assert not texts.exists()
    written = run("texts", model, *options)
    assert written.exit_code == 0 and written.stdout.startswith("1 texts of "), written.output
    result = run("texts", model, *options, "--tokens", "5")
    assert result.stdout.startswith("1 texts of 5 tokens in ")
    run("texts", model, *options)
    ask = ("generate", model, "-p", "hi", "-n", "40", "--stats", "--method")
    for method in ("sam", "token_recycling:lookup=sam"):
        made = run(*ask, f"{method}:texts={texts}")
        assert made.exit_code == 0, made.output
        assert made.stdout.strip() == answer.strip()
    refused(run(*ask, "sam:texts=none"), "texts=none: there is no such file")
    refused(run(*ask, f"token_recycling:texts={texts}"), "'texts'", "lookup=sam")
    texts.write_bytes(b"x" * 50)
    refused(run(*ask, f"sam:texts={texts}"), f"cannot read the texts in {texts}")


def test_generate_reads_files_and_stdin_and_prints_statistics(model: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hi", encoding="utf-8")
    assert (
        run("generate", model, "--prompt-file", str(file), "-n", "12").stdout
        == plain_answer() + "\n"
    )
    file.write_bytes(b"\xef\xbb\xbfhi")
    marked = run("generate", model, "--prompt-file", str(file), "-n", "12")
    assert marked.stdout == plain_answer() + "\n"
    marked = run("generate", model, "-n", "12", text=b"\xef\xbb\xbfhi")
    assert marked.stdout == plain_answer() + "\n"
    result = run("generate", model, "-n", "12", "--stats", text="hi")
    assert result.stdout == plain_answer() + "\n"
    for part in ("12 tokens in ", " tokens/s, ended at the token limit\n", " thread"):
        assert part in result.stderr
    drafted = run("generate", model, "-n", "12", "--stats", *DRAFTING, text="hi").stderr
    assert "% of the drafted tokens were accepted" in drafted
    assert " tokens per pass" in drafted


@pytest.mark.parametrize(
    "running, expected", [(1, "1 of 4 threads (currently the fastest number)"), (4, "4 threads")]
)
def test_statistics_say_how_many_threads_run(
    monkeypatch: pytest.MonkeyPatch, running: int, expected: str
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert options.threads_line(SimpleNamespace(threads=running)).startswith(expected)


def test_raw_prompts_and_stop_strings(model: str) -> None:
    words, network = tiny_model.tokenizer(), tiny_model.model()
    ids = words("hi", return_tensors="pt")["input_ids"]
    expected = words.decode(
        network.generate(ids, do_sample=False, max_new_tokens=12)[0, 2:], skip_special_tokens=True
    )
    assert run("generate", model, "--raw", "-p", "hi", "-n", "12").stdout == expected + "\n"
    stop = next(c for c in plain_answer(60)[3:] if c.isascii() and c.isprintable())
    stopped = run("generate", model, "-p", "hi", "-n", "60", "--stop", stop).stdout.removesuffix(
        "\n"
    )
    assert (
        stopped.endswith(stop) and stopped.count(stop) == 1 and plain_answer(60).startswith(stopped)
    )


def test_sampling_is_seeded(model: str) -> None:
    arguments = ["generate", model, "-p", "hi", "-n", "20", "--temperature", "1.0", "--seed"]
    first, again, other = (run(*arguments, seed).stdout for seed in ("3", "3", "4"))
    assert first == again != other


def test_the_models_generation_config_is_followed_and_options_go_before_it(
    data: str, tmp_path: Path
) -> None:
    folder = tiny_model.save(tmp_path)
    file = folder / "generation_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "no_repeat_ngram_size": 1, "max_new_tokens": 9}))
    words, network = tiny_model.tokenizer(), tiny_model.model()
    network.generation_config.no_repeat_ngram_size = 1
    ids = words.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    for more, length in (((), 9), (("-n", "40"), 40)):
        said = network.generate(ids, do_sample=False, max_new_tokens=length)[0, ids.shape[1] :]
        expected = words.decode(said, skip_special_tokens=True)
        assert run("generate", str(folder), "-p", "hi", *more).stdout == expected + "\n"
    file.write_text(json.dumps({**config, "do_sample": True, "repetition_penalty": 1.4}))
    arguments = ("generate", str(folder), "-p", "hi", "-n", "20")
    sampled = run(*arguments, "--seed", "3")
    assert sampled.stdout != run(*arguments, "--seed", "4").stdout
    assert "note: the model's generation_config asks for sampling" in sampled.stderr
    bare = run(*arguments, "--temperature", "0", "--repetition-penalty", "1")
    assert bare.stdout == plain_answer(20) + "\n" and not bare.stderr
    assert run(*arguments, "--temperature", "0").stdout != bare.stdout
    measured = run(
        "bench", str(folder), "--data", data, "--repeats", "1", "-n", "8", "--dtype", "float32"
    )
    assert measured.exit_code == 0, measured.output
    assert "do_sample, repetition_penalty 1.4; multirate ignores it with every method" in (
        measured.stderr.replace("\n", " ")
    )


def test_answers_end_at_the_models_own_stop_strings(tmp_path: Path) -> None:
    """As `generate` ends them."""
    model, data = tiny_model.save(tmp_path / "model"), tmp_path / "data.jsonl"
    data.write_text(json.dumps({"instruction": "abc"}))

    def said(name: str) -> dict[str, Any]:
        command = ("answers", str(model), "--data", str(data), "--out", str(tmp_path / name))
        assert run(*command, "--max-new-tokens", "40").exit_code == 0
        [found] = json.loads((tmp_path / name).read_text())["said"]
        return found

    whole, words = said("whole")["answer"], tiny_model.tokenizer()
    place = next(at for at, token in enumerate(whole) if at and words.decode(token).isascii())
    file = model / "generation_config.json"
    asked = {"stop_strings": [words.decode(whole[place])]}
    file.write_text(json.dumps(json.loads(file.read_text()) | asked))
    cut = said("cut")
    assert cut["ended"] == "stop_string" and cut["answer"] == whole[: place + 1]


def test_a_tokenizer_of_another_model_is_not_trained_with(tmp_path: Path) -> None:
    """It knows tokens that the model does not have."""
    folder, data, out = tmp_path / "model", tmp_path / "data.jsonl", tmp_path / "out"
    tiny_model.model(vocab_size=40).save_pretrained(folder)
    tiny_model.tokenizer().save_pretrained(folder)
    data.write_text(json.dumps({"instruction": "abc", "output": "def"}))
    for command in ("texts", "train"):
        done = run(command, str(folder), "--data", str(data), "--out", str(out))
        refused(done, "outside 0..39 (the model's vocabulary), so it belongs to another model")
    assert not list(out.iterdir())


def test_text_that_is_not_utf8_is_refused(model: str, tmp_path: Path) -> None:
    odd = "caf\udce9"  # as Python reads b"caf\xe9" from the command line
    refused(run("generate", model, text=b"caf\xe9"), "stdin: not UTF-8 text (byte 3)")
    refused(run("generate", model, "-p", odd), "--prompt: not UTF-8 text (byte 3)")
    refused(run("generate", model, "-p", "hi", "--stop", "a", "--stop", odd), "--stop: not UTF-8")
    refused(run("generate", odd, "-p", "hi"), "MODEL: not UTF-8")
    refused(run("inspect", model, "-o", str(tmp_path / "page"), "-p", odd), "--prompt: not UTF-8")
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"caf\xe9")
    refused(run("generate", model, "--prompt-file", str(file)), "prompt.txt: not UTF-8 text (byte")
    refused(run("bench", model, "--data", odd), "no such file")  # the name of a file is any bytes


def test_a_character_that_the_terminal_lacks_is_shown_by_its_code(model: str) -> None:
    code = "from multirate.cli.main import run; run()"
    arguments = [sys.executable, "-c", code, "generate", model, "-p", "hi", "-n", "60"]
    narrow = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(arguments, capture_output=True, env=narrow, check=True)
    written = plain_answer(60).encode("latin-1", "backslashreplace")
    assert b"\\" in written and done.stdout == written + b"\n"


def test_what_generate_refuses(model: str, tmp_path: Path) -> None:
    refused(run("generate", model, "-p", " "), "the prompt is empty")
    refused(run("generate", model, text=""), "the prompt is empty")
    refused(run("generate", model, "--raw", "-p", "x" * 600), "600 tokens", "512")
    refused(run("generate", model, "-p", "hi", "--prompt-file", "x"), "not both")
    refused(
        run("generate", model, "--prompt-file", str(tmp_path / "none")),
        "cannot read",
        "no such file",
    )
    refused(run("generate", model, "-p", "hi", "--temperature", "-1"), "temperature", "-1")
    refused(run("generate", model, "-p", "hi", "--method", "magic"), "magic", "autoregressive")
    refused(
        run("generate", model, "-p", "hi", "--method", "m2r2"),
        "m2r2",
        "needs a trained accelerator",
    )
    refused(run("generate", model, "-p", "hi", "--speculate", "maybe"), "maybe")
    refused(run("generate", model, "-p", "hi", "--backend", "gpu"), "gpu", "native")
    refused(run("generate", model, "-p", "hi", "--dtype", "int3"), "int3", "bfloat16")
    refused(run("generate", model, "-p", "hi", "--device", "warp"), "warp")
    refused(run("generate", model, "-p", "hi", "--threads", "0"), "--threads is 0")
    refused(run("generate", model, "-p", "hi", "--threads", "100000"), "--threads is 100000")
    refused(run("generate", model, "-p", "hi", "--device", "meta"), "meta", "cpu, or cuda")
    refused(run("generate", model, "-p", "hi", "--mode", "fast"), "fast", "lossless, dynamic")
    refused(run("generate", model, "-p", "hi", "--quality", "0.9"), "needs mode 'dynamic'")
    late = run("generate", model, "-p", "hi", "--stop", "")
    refused(late, "stop")
    assert late.stdout == ""  # no line was begun
    assert run("generate", model, "-p", "hi", "-n", "0").stdout == "\n"
    for setting in ("tokens=4097", "tokens=0", "max_ngram=0"):
        refused(
            run("generate", model, "-p", "hi", "--method", f"prompt_lookup:{setting}"),
            "from 1" if "t" in setting[0] else "max_ngram",
        )
    twice = "prompt_lookup:tokens=2:tokens=3"
    refused(run("generate", model, "-p", "hi", "--method", twice), "tokens is given twice")
    refused(run("generate", model, "-p", "hi", "-n", "-1"), "max_new_tokens", "-1")
    refused(run("generate", model, "-p", "hi", "-a", str(tmp_path)), "accelerator.json")


def test_unusable_models(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(
        run("generate", "./nowhere", "-p", "hi"),
        "./nowhere",
        "local folder, a GGUF file or a hub id",
    )
    refused(run("generate", str(tmp_path), "-p", "hi"), "config.json")
    refused(run("generate", __file__, "-p", "hi"), "is a file")
    refused(run("generate", "bad name!", "-p", "hi"), "bad name!")

    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "no_such_model"}')
    refused(run("generate", str(unknown), "-p", "hi"), "no_such_model")

    broken = tmp_path / "broken"
    tiny_model.save(broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(run("generate", str(broken), "-p", "hi"), "cannot be loaded")


def test_no_connection_is_said(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "multirate.cli.main", "info", "someone/some-model"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "hub cannot be reached" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_said_at_once(tmp_path: Path) -> None:
    """Nothing listens at the discard port: every request is refused at once, and the hub's client
    would repeat each.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    out = str(tmp_path / "out")
    commands = (
        ["generate", "someone/some-model", "-p", "hi"],
        ["train", "someone/some-model", "--data", __file__, "--out", out],
        ["pack", "someone/some-model", "--out", out],
        ["generate", "tiny", "-p", "hi", "-a", "someone/some-accelerator"],
    )
    # one after the other in a process of their own, which is what takes the time
    script = f"import sys; from multirate.cli.main import run\nfor words in {commands}:\n"
    script += " sys.argv = ['multirate', *words]\n try: run()\n except SystemExit as end:\n"
    script += "  print(f'exit code {end.code}', file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    # the client says each of its repetitions on a line
    lines = done.stderr.splitlines()
    assert len(lines) == 8 and lines[1::2] == ["exit code 2"] * 4, done.stderr
    for line in lines[::2]:
        for said in (
            "someone/some-",
            "hub cannot be reached",
            "local folder",
            "m2r2-carry" if "some-accelerator" in line else "smollm2",
        ):
            assert said in line
        assert ("m2r2-carry" in line) != ("smollm2" in line)  # names of its kind alone
    assert not Path(out).exists() or not any(Path(out).iterdir())


@pytest.mark.slow
def test_embedded_names_work_in_every_command(
    tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "multirate.loading.hub._hub_answers", lambda: pytest.fail("the hub was asked")
    )
    outputs = [
        run("generate", "tiny", "-p", "Hello", "-n", "8", *method).stdout
        for method in ([], ["--speculate", "never"])
    ]
    assert outputs[0] == outputs[1] and outputs[0].strip()
    shown = run("info", "tiny")
    assert "m2r2-carry" in shown.stdout and "backend='hf'" not in shown.stdout
    done = run("generate", "tiny", "-p", "Hello", "-n", "4", "-a", "kangaroo")
    assert done.exit_code == 0, done.output
    done = run(
        "bench",
        "tiny",
        "--suite",
        "mt_bench",
        "--data",
        data,
        "-n",
        "4",
        "--limit",
        "1",
        "--repeats",
        "1",
        "--methods",
        "autoregressive,kangaroo",
    )
    assert done.exit_code == 0 and "kangaroo" in done.stdout, done.output
    sample = {
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hello there."},
        ]
    }
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps(sample) + "\n" for _ in range(4)))
    out = str(tmp_path / "answers.jsonl")
    done = run(
        "answers",
        "tiny",
        "--data",
        str(texts),
        "--out",
        out,
        "--limit",
        "1",
        "--max-new-tokens",
        "4",
    )
    assert done.exit_code == 0, done.output
    done = run(
        "train",
        "tiny",
        "--data",
        str(texts),
        "--out",
        str(tmp_path / "m2r2"),
        "--steps",
        "1",
        "--tokens-per-batch",
        "64",
        "--max-length",
        "32",
    )
    assert done.exit_code == 0, done.output
    store = tmp_path / "store"
    done = run("pack", str(MIXTURE), "--out", str(store))
    assert done.exit_code == 0, done.output
    assert "0.0" not in done.stdout.split(":", 1)[1] and (
        "kB" in done.stdout or "MB" in done.stdout
    )
    done = run("generate", str(MIXTURE), "--experts", str(store), "-p", "Hello", "-n", "4")
    assert done.exit_code == 0, done.output
    refused(run("pack", "tiny", "--out", str(tmp_path / "none")), "experts")


def test_a_layer_that_is_not_packed_takes_one_line(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from multirate.cli import options

    load = options.load

    def hooked(*arguments: Any, **settings: Any) -> Any:
        loaded = load(*arguments, **settings)
        loaded.model.model.layers[0].mlp.register_forward_hook(
            lambda module, inputs, output: output
        )
        return loaded

    monkeypatch.setattr(options, "load", hooked)
    done = run("generate", model, "-p", "hi", "-n", "2", "--dtype", "bfloat16")
    assert done.exit_code == 0
    notes = [line for line in done.stderr.splitlines() if "own layers" in line]
    assert (
        len(notes) == 1
        and notes[0].startswith("note: ")
        and "layers.0.mlp has a forward hook" in notes[0]
    )


def test_bench_reports_and_writes(model: str, data: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run(
        "bench",
        model,
        "--suite",
        "mt_bench",
        "--data",
        data,
        "--methods",
        "generate,autoregressive,layerskip",
        "-n",
        "8",
        "--repeats",
        "2",
        "--dtype",
        "float32",
        "--json",
        str(out),
    )
    assert result.exit_code == 0, (result.output, result.exception)
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stdout.count("yes") == 3
    read = json.loads(out.read_text())
    assert [row["method"] for row in read["rows"]] == ["generate", "autoregressive", "layerskip"]
    assert read["prompts"] == 3 and read["max_new_tokens"] == 8 and read["dtype"] == "float32"
    for row in read["rows"]:
        assert (
            row["lossless"]
            and row["tokens"] == 24
            and row["identical"] == 3
            and row["diverged"] == 0
        )
        assert row["speedup"] > 0 and len(row["seconds_per_repeat"]) == 2
    assert max(r["tokens_per_second"] for r in read["rows"] if r["method"] == read["baseline"]) > 0
    assert read["rows"][1]["tokens_per_step"] == 1


def test_bench_leaves_out_answers_in_loops(data: str, tmp_path: Path) -> None:
    """A model without weights says one token for ever."""
    weights = tiny_model.save(tmp_path) / "model.safetensors"
    tensors = load_file(weights)
    for tensor in tensors.values():
        tensor.zero_()
    save_file(tensors, weights, {"format": "pt"})
    out = tmp_path / "out.json"
    words = ["bench", str(tmp_path), "--data", data, "--repeats", "1", "--leave-out-loops"]
    words += ["--methods", "autoregressive", "--json", str(out)]
    result = run(*words, "-n", "2")
    assert result.exit_code == 0 and "0 of 3 answers that repeat in loops" in result.stderr
    content = json.loads(out.read_text())
    assert content["prompts"] == 3 and content["loops"] == []
    result = run(*words, "-n", "64")
    assert "3 of 3 answers that repeat in loops" in result.stderr
    assert "Nothing was measured: all answers repeat in loops." in result.stdout
    content = json.loads(out.read_text())
    assert content["prompts"] == 0 and len(content["loops"]) == 3 and not content["rows"]
    refused(run(*words, "--batch", "2"), "--leave-out-loops", "leave out --batch 2")


def test_bench_in_batches(model: str, data: str, tmp_path: Path) -> None:
    words = ["bench", model, "--data", data, "-n", "6", "--repeats", "1", "--dtype", "float32"]
    methods = ["--methods", "generate,autoregressive,prompt_lookup"]
    rows = []
    for batch in ("1", "2"):
        out = tmp_path / f"{batch}.json"
        done = run(*words, *methods, "--batch", batch, "--json", str(out))
        title = " ".join(done.stdout.split())  # the folder's path may wrap it
        assert done.exit_code == 0 and f"batch {batch}, greedy" in title, done.output
        read = json.loads(out.read_text())
        assert read["batch"] == int(batch)
        rows.append([(r["method"], r["tokens"], r["identical"], r["steps"]) for r in read["rows"]])
    assert rows[0] == rows[1]
    refused(run(*words, "--batch", "0"), "--batch is 0")
    refused(run(*words, "--batch", "2", "--baselines", "assisted"), "leave out --batch 2")


def test_a_baseline_that_is_not_there_costs_its_row_only(
    model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name == "llama_cpp" else find(name, *a)
    )
    out = tmp_path / "out.json"
    done = run(
        *("bench", model, "--data", data, "--limit", "1", "-n", "4", "--repeats", "1"),
        *("--dtype", "float32", "--methods", "autoregressive", "--json", str(out)),
        *("--baselines", "llamacpp,assisted"),
    )
    assert done.exit_code == 0, done.output
    assert "note: no row for llamacpp: llama.cpp is not installed" in done.stderr
    assert "Memory bandwidth of this machine: " in done.stdout and "reads weights at" in done.stdout
    content = json.loads(out.read_text())
    assert [row["method"] for row in content["rows"]] == [
        "autoregressive",
        "generate-lookup",
        "generate-early-exit",
    ]
    assert content["baseline"] == "autoregressive"
    assert content["unavailable"][0]["method"] == "llamacpp"
    assert content["plain_share_of_bandwidth"] > 0
    refused(
        run("bench", model, "--data", data, "--baselines", "vllm"),
        "'vllm'",
        "assisted, bf16, llamacpp",
    )


def test_sampled_answers_are_compared_token_by_token(model: str, data: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run(
        *("bench", model, "--data", data, "--limit", "2", "-n", "12", "--repeats", "1"),
        *("--dtype", "float32", "--methods", "generate,autoregressive,prompt_lookup"),
        *("--temperature", "1", "--seed", "7", "--json", str(out)),
    )
    assert done.exit_code == 0, done.output
    assert "note: no row for generate: generate uses other random numbers" in done.stderr
    assert "temperature 1, seed 7" in " ".join(done.stdout.split())
    content = json.loads(out.read_text())
    assert [row["identical"] for row in content["rows"]] == [3, 3]
    assert content["temperature"] == 1 and content["seed"] == 7
    refused(run("bench", model, "--data", data, "--temperature", "-1"), "temperature", "at least 0")
    refused(
        run("bench", model, "--data", data, "--temperature", "1", "--baselines", "assisted"),
        "--temperature",
        "only with greedy decoding",
    )


def test_answers_needs_questions_from_somewhere(model: str, tmp_path: Path) -> None:
    refused(run("answers", model, "--out", str(tmp_path / "own.jsonl")), "--data", "--questions")


def test_bench_goes_on_where_a_method_fails(
    model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its traceback is told, and exit code 1; the others have their rows."""

    def fail(*given: Any, **more: Any) -> None:
        raise IndexError("no such thing")

    monkeypatch.setattr(TokenRecyclingDrafter, "draft", fail)
    out = tmp_path / "out.json"
    result = run(
        *("bench", model, "--data", data, "--limit", "1", "-n", "6", "--repeats", "1"),
        *("--methods", "autoregressive,token_recycling,prompt_lookup", "--json", str(out)),
    )
    assert result.exit_code == 1, (result.output, result.exception)
    assert "IndexError: no such thing" in result.stderr and "Traceback" in result.stderr
    assert "Traceback" not in result.stdout
    content = json.loads(out.read_text())
    assert [row["method"] for row in content["rows"]] == ["autoregressive", "prompt_lookup"]
    (told,) = content["unavailable"]
    assert told["method"] == "token_recycling" and "no such thing" in told["reason"]


def test_bench_of_all_methods_with_a_report(model: str, data: str, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "first"
    result = run(
        *("bench", model, "--data", data, "--limit", "1", "-n", "4", "--repeats", "1"),
        *("--methods", "all", "--report", str(out)),
    )
    assert result.exit_code == 0, (result.output, result.exception)
    content = json.loads((out / "results.json").read_text())
    rows = [row["method"] for row in content["rows"]]
    assert rows[:2] == ["generate", "autoregressive"]
    measured = {*rows, *(one["method"] for one in content["unavailable"])}
    joined = "token_recycling:lookup=sam"  # of those that need no accelerator
    assert measured == {*rows[:2], *untrained_drafters(), joined}
    assert joined in rows
    assert "</html>" in (out / "report.html").read_text()
    (tmp_path / "file").write_text("")
    refused(
        run("bench", model, "--data", data, "--report", str(tmp_path / "file")), "create the folder"
    )


@pytest.mark.parametrize("existed", [False, True])
def test_bench_that_measured_nothing_leaves_no_new_folder(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool
) -> None:
    out = tmp_path / "runs" / "first"
    if existed:
        out.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    words = ("bench", "tiny", "--data", data, "--report", str(out), "--methods")
    own = list(reference_accelerators("tiny"))
    refused(run(*words, f"{own[0]},magic"), "'magic'", "all, dynamic, generate, ", *own)
    assert sorted(tmp_path.rglob("*")) == before

    def interrupted(*arguments: Any, **settings: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("multirate.cli.options.load", interrupted)
    result = run(*words, "autoregressive")
    assert result.exit_code == 130 and result.stderr == "interrupted\n", result.output
    assert sorted(tmp_path.rglob("*")) == before


def test_bench_skips_what_does_not_fit_and_says_so(model: str, tmp_path: Path) -> None:
    data = tmp_path / "long.jsonl"
    data.write_text("\n".join(json.dumps({"text": text}) for text in ("x" * 600, "short")))
    arguments = [
        "bench",
        model,
        "--suite",
        "text",
        "--data",
        str(data),
        "--methods",
        "autoregressive",
        "-n",
        "4",
    ]
    arguments += ["--repeats", "1", "--dtype", "float32", "--json", str(tmp_path / "o.json")]
    result = run(*arguments)
    assert result.exit_code == 0 and "skipped 1 prompt (1#1), too long" in result.stderr
    assert json.loads((tmp_path / "o.json").read_text())["skipped"] == ["1#1"]
    result = run(*arguments, "--truncate")
    assert result.exit_code == 0 and "cut 1 prompt (1) from the left" in result.stderr


def test_bench_ends_with_1_and_no_speedup_on_wrong_answers(
    model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect put into verification on purpose: the last accepted token is replaced."""
    from multirate.decoding.speculate import step as speculative

    right = speculative.accept_greedy

    def wrong(*arguments):  # type: ignore[no-untyped-def]
        path, bonus = right(*arguments)
        return path, (bonus + 1) % 261

    monkeypatch.setattr(speculative, "accept_greedy", wrong)
    out = tmp_path / "out.json"
    result = run(
        "bench",
        model,
        "--data",
        data,
        "--methods",
        "autoregressive,layerskip",
        "-n",
        "8",
        "--repeats",
        "1",
        "--dtype",
        "float32",
        "--json",
        str(out),
    )
    assert result.exit_code == 1, result.output
    assert "withheld" in result.stdout and "WRONG" in result.stdout
    row = json.loads(out.read_text())["rows"][1]
    assert row["speedup"] is None and row["diverged"] == 3


def test_what_bench_refuses(model: str, data: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"turns": ["a"]}\n{"turns": []}\n')
    refused(run("bench", model, "--data", str(bad)), f"{bad}, line 2")
    refused(run("bench", model, "--data", data, "--suite", "glue"), "glue", "mt_bench")
    refused(
        run("bench", model, "--data", str(tmp_path / "none.jsonl")), "none.jsonl", "no such file"
    )
    refused(
        run("bench", model, "--data", data, "--json", str(tmp_path / "no" / "o.json")),
        "cannot write",
    )
    refused(run("bench", model, "--data", data, "--methods", ","), "--methods")
    refused(run("bench", model, "--data", data, "--methods", "autoregressive,m2r2"), "m2r2")
    refused(run("bench", model, "--data", data, "--suite", "glue"), "glue", "wikisql")
    refused(run("bench", model, "--data", data, "--html", "p.html"), "needs --methods experts")
    refused(run("bench", model, "--data", data, "--disk-speed", "1MB/s"), "needs --methods experts")
    experts = ["bench", model, "--data", data, "--methods", "experts"]
    for words in (["--report", str(tmp_path / "r")], ["--baselines", "llamacpp"]):
        refused(run(*experts, *words), words[0], "does not work with experts loaded from disk")
    assert not (tmp_path / "r").exists()
    refused(run("bench", model, "--data", data, "--repeats", "0"), "--repeats is 0")
    refused(run("bench", model, "--data", data, "-n", "512"), "at most 511")
    refused(run("bench", model, "--data", data, "--accelerator", "mine=./x"), "./x")
    assert run("bench", model).exit_code == 2  # no --data
    assert list(tmp_path.iterdir()) == [bad]


def test_info_says_what_is_supported_and_what_is_not(model: str, tmp_path: Path) -> None:
    result = run("info", model)
    assert result.exit_code == 0, result.output
    for part in (
        "LlamaForCausalLM",
        "4 of width 64",
        "512 tokens",
        "supported",
        "yes",
        "layerskip",
    ):
        assert part in result.stdout, result.stdout

    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(
        BloomConfig(vocab_size=261, hidden_size=32, n_layer=2, n_head=2)
    ).save_pretrained(tmp_path)
    tiny_model.tokenizer().save_pretrained(tmp_path)
    result = run("info", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "supported" in result.stdout and "no: " in result.stdout


def test_ctrl_c_ends_with_130_and_keeps_what_is_complete(
    model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT comes in the second repeat, after one call of preparation, two of warm-up, and six of
    the first repeat.
    """
    from multirate.engine import Engine

    right, calls = Engine.generate, 0

    def interrupted(self: Engine, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1 + 2 + 6 + 2:
            signal.raise_signal(signal.SIGINT)
        return right(self, *arguments, **named)

    monkeypatch.setattr(Engine, "generate", interrupted)
    out = tmp_path / "out.json"
    result = run(
        "bench",
        model,
        "--data",
        data,
        "--methods",
        "autoregressive,layerskip",
        "-n",
        "4",
        "--repeats",
        "5",
        "--dtype",
        "float32",
        "--json",
        str(out),
    )
    assert result.exit_code == 130, (result.output, result.exception)
    assert "interrupted" in result.stderr
    read = json.loads(out.read_text())
    assert read["interrupted"] and read["repeats"] == 1 and read["prompts"] == 3

    calls = 10  # and while nothing can be kept
    result = run("generate", model, "-p", "hi")
    assert result.exit_code == 130 and "interrupted" in result.stderr


def test_train_has_every_setting_and_refuses_in_one_sentence(
    model: str, data: str, tmp_path: Path
) -> None:
    from dataclasses import fields

    from multirate.training.settings import TrainSettings

    text = run("train", "--help").stdout
    for field in fields(TrainSettings):
        assert f"--{field.name.replace('_', '-')}" in text
    out = str(tmp_path / "out")
    refused(run("train", model, "--data", data, "--out", out, "--steps", "0"), "steps")
    refused(run("train", model, "--data", data, "--out", out, "--seed", "-1"), "seed")
    refused(
        run("train", model, "--data", data, "--out", out, "--objective", "experts"),
        "mixtures of experts",
    )
    refused(run("train", model, "--data", data, "--out", out, "--method", "magic"), "magic")
    refused(run("train", model, "--data", data, "--out", out, "--option", "rank"), "NAME=VALUE")
    refused(run("train", model, "--data", data, "--out", out, "--option", "rank=0"), "rank")
    refused(run("train", model, "--data", str(tmp_path / "no.jsonl"), "--out", out), "no.jsonl")
    refused(run("train", "./nowhere", "--data", data, "--out", out), "nowhere")


def test_no_space_is_one_sentence(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    done = subprocess.run(
        f"{sys.executable} -m multirate.cli.main generate {model} -p hi -n 4 > /dev/full",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done
    assert "no space left on device" in done.stderr and "Traceback" not in done.stderr


def test_public_names() -> None:
    assert multirate.attach is attach
    assert all(getattr(multirate, name) is not None for name in multirate.__all__)
    with pytest.raises(AttributeError):
        _ = multirate.nothing


def test_a_list_in_a_method_s_settings_is_not_split() -> None:
    assert method_names("generate, medusa:widths=[3,2]:k=4,generate,layerskip") == [
        "generate", "medusa:widths=[3,2]:k=4", "layerskip",
    ]  # fmt: skip


def test_auto_says_once_that_cuda_is_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    from multirate.errors import Notice
    from multirate.loading.hub import find_device

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.warns(Notice, match="drafting has not been measured"):
        assert find_device("auto").type == "cuda"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_device("auto").type == "cuda"
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        assert find_device("auto").type == "cpu"
