"""Everything that has to be measured on a GPU, in one command, for as long as one can be had.

    python benchmarks/gpu_campaign.py --minutes 40 --model smollm2 --out campaign

Parts, most valuable first; each has its share of the time, is independent of the others, and is
skipped when an earlier run finished it (`--out` is kept). After every part `campaign.json` is
written: provenance, and of each part what it measured or the error that it ended with. Trained
weights lie beside it. `--tiny` runs every part on random tiny models, on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, OlmoeConfig

import multirate
from multirate import StopSettings, UserError
from multirate.io import write_json
from multirate.lab.bench.divergence import Judge
from multirate.lab.bench.method_runs import GENERATE, GENERATE_STATIC, method_run
from multirate.lab.bench.prompts import Prompt, build_prompts
from multirate.lab.bench.rows import summarise
from multirate.lab.bench.runner import Unavailable, measure
from multirate.lab.bench.suites import load_suite
from multirate.loading.hub import find_device, load_model, reference_accelerators
from multirate.methods.spec import PLAIN
from multirate.provenance import collect

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("m2r2-carry", "m2r2", "kangaroo")
BATCHES = (1, 4, 16)
GRACE = 120
"""Seconds that an interrupted command may take to write its checkpoint."""


class Ended(Exception):
    """The part's time is over; the next run of the campaign goes on with it."""


@dataclass
class Campaign:
    """What all parts share.

    device: torch's name for it. questions: of MT-Bench; None: random tokens. accelerators: measured
    beside the model's packaged ones. deadline: of the part that runs.
    """

    model: str
    device: str
    out: Path
    tiny: bool
    questions: Path | None = None
    accelerators: tuple[Path, ...] = ()
    deadline: float = 0.0

    def left(self) -> float:
        """Seconds of this part; raises Ended when there are none."""
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise Ended
        return seconds

    def command(self, *arguments: str) -> None:
        """`multirate …`, in a process of its own. Out of time it is interrupted (it can be
        continued), and Ended raised; RuntimeError with what it said last when it fails.
        """
        code = "from multirate.cli.main import run; run()"
        self._run([sys.executable, "-c", code, *arguments])

    def tests(self, *paths: str) -> str:
        """pytest's last line over some test files."""
        lines = self._run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths])
        return lines[-1]

    def _run(self, command: list[str]) -> list[str]:
        seconds = self.left()
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(GRACE)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                raise Ended from None
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines() or [""]
        if code:
            raise RuntimeError("\n".join(lines[-15:]))
        return lines


def correctness(campaign: Campaign) -> dict[str, Any]:
    """The captured passes against transformers on this device, one sequence and several, plainly
    and with drafts: what the CPU tests only imitate. Then those tests themselves.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    from runtime.tiny_models import MOE, NAMES, prompts, tiny_model

    found: dict[str, Any] = {}
    stop, (first, second) = StopSettings(max_new_tokens=12), prompts(7, 11, seed=4)
    for name in ["llama"] if campaign.tiny else [n for n in NAMES if n not in MOE]:
        campaign.left()
        model = tiny_model(name).to(campaign.device)
        engine = multirate.attach(model, backend="hf")
        expected = [
            model.generate(ids[None].to(campaign.device), max_new_tokens=12, do_sample=False)
            for ids in (first, second)
        ]
        new = [
            out[0, len(ids) :].tolist() for out, ids in zip(expected, (first, second), strict=True)
        ]
        entry: dict[str, Any] = {}
        for method in (PLAIN, "prompt_lookup"):
            both = engine.generate(
                [first.tolist(), second.tolist()], stop=stop, method=method, speculate="always"
            )
            one = engine.generate([first.tolist()], stop=stop, method=method, speculate="always")
            entry[method] = both.sequences == new and one.sequences == new[:1]
        entry["graph_fallback"] = getattr(engine.decoder, "graph_fallback", "no graphs here")
        found[name] = entry
        model.to("cpu")
    wrong = [n for n, entry in found.items() if not all(entry[m] for m in (PLAIN, "prompt_lookup"))]
    said = campaign.tests("tests/runtime/test_cuda_graphs.py", *(["-k", "survive"] * campaign.tiny))
    return {"models": found, "other_tokens_than_generate": wrong, "tests": said}


class _Alarm(KeyboardInterrupt):
    """On which `measure` keeps what is finished."""


def _ring(*_: Any) -> None:
    raise _Alarm


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """As if Ctrl-C were pressed then. Raises Ended where nothing inside keeps that."""
    before = signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _Alarm:
        raise Ended from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _measured(
    campaign: Campaign,
    engine: Any,
    prompts: list[Prompt],
    names: list[str],
    new: int,
    batches: tuple[int, ...] = BATCHES,
) -> dict[str, Any]:
    """Rows by batch, of those methods that can be measured. Raises Ended where the time was over
    before anything was.
    """
    rows: dict[str, Any] = {}
    for batch in batches[:2] if campaign.tiny else batches:
        runs, unavailable = [], {}
        for name in names:
            campaign.left()
            try:
                runs.append(method_run(engine, name, new))
            except Unavailable as error:
                unavailable[name] = str(error)
        wait = torch.cuda.synchronize if campaign.device.startswith("cuda") else None
        chosen, repeats = prompts[: max(4, batch)], 1 if campaign.tiny else 3
        with _interrupted_after(campaign.left()):
            measured = measure(runs, chosen, repeats=repeats, batch=batch, synchronize=wait)
        found = [asdict(row) for row in summarise(measured, Judge(engine.model))]
        if not found:
            raise Ended
        for failure in measured.failed.values():
            print(failure, file=sys.stderr)
        rows[str(batch)] = {
            "rows": found,
            "unavailable": unavailable | measured.ended,
            "interrupted": measured.interrupted,
        }
    return rows


def _random_llama(campaign: Campaign, size: str) -> Any:
    shapes = {
        "1b": dict(
            hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_key_value_heads=4
        ),
        "7b": dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32),
        "tiny": dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2),
    }
    shape = shapes["tiny" if campaign.tiny else size]
    heads = max(1, shape["hidden_size"] // (8 if campaign.tiny else 64 if size == "1b" else 128))
    config = LlamaConfig(
        **shape, num_attention_heads=heads, vocab_size=261 if campaign.tiny else 32000
    )
    torch.manual_seed(0)
    with torch.device(campaign.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _prompts(campaign: Campaign, engine: Any, new: int) -> list[Prompt]:
    """Sixteen: first turns of the questions, or random tokens."""
    count, vocabulary = max(BATCHES), engine.decoder.info.vocab_size
    if campaign.questions is None or engine.tokenizer is None:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(5, vocabulary, (count, 24), generator=draw)
        return [Prompt(str(i), row.tolist()) for i, row in enumerate(ids)]
    asked = load_suite("mt_bench", campaign.questions, count)
    first = [replace(question, turns=question.turns[:1]) for question in asked]
    return build_prompts(
        first,
        engine.tokenizer,
        lambda ids: [],  # answers, which no turn follows
        max_positions=engine.decoder.info.max_positions,
        max_new_tokens=new,
        truncate=True,
    ).prompts


def decoding(batch: int) -> Callable[[Campaign], dict[str, Any]]:
    """Plain decoding, text lookup and the drafts of every accelerator against `generate`."""

    def part(campaign: Campaign) -> dict[str, Any]:
        name = "tiny" if campaign.tiny else campaign.model  # a model with accelerators
        engine = multirate.attach(load_model(name, "bfloat16", campaign.device))
        for folder in (*reference_accelerators(name).values(), *campaign.accelerators):
            engine.add(folder)
        names = [GENERATE, PLAIN, "sam", *_with_own_drafts(engine)]
        new = 8 if campaign.tiny else 128
        rows = _measured(campaign, engine, _prompts(campaign, engine, new), names, new, (batch,))
        return {"batches": rows, "graph_fallback": getattr(engine.decoder, "graph_fallback", None)}

    return part


def _with_own_drafts(engine: Any) -> list[str]:
    """The accelerators as they are used; where text lookup is part of that, also without it."""
    names = []
    for name in engine.accelerators:
        joins = getattr(engine.spec_of(name).read_settings(), "lookup", None)
        names += [f"{name}:lookup=0", name] if joins else [name]
    return names


def shape(size: str) -> Callable[[Campaign], dict[str, Any]]:
    """Plain decoding against `generate`, of a model of that size with random weights."""

    def part(campaign: Campaign) -> dict[str, Any]:
        engine = multirate.attach(_random_llama(campaign, size))
        new = 8 if campaign.tiny else 128
        names = [GENERATE, GENERATE_STATIC, PLAIN, "prompt_lookup"]
        if campaign.tiny:
            names.remove(GENERATE_STATIC)  # half a minute of a compiler
        rows = _measured(campaign, engine, _prompts(campaign, engine, new), names, new)
        return {"batches": rows, "graph_fallback": getattr(engine.decoder, "graph_fallback", None)}

    return part


def answers(campaign: Campaign) -> dict[str, Any]:
    """The model's own answers to its own questions: 10M tokens and more."""
    own = campaign.out / "own.jsonl"
    arguments = ["--questions", "70000", "--batch", "256"]
    if campaign.tiny:
        data = campaign.out / "questions.jsonl"
        lines = [{"instruction": f"question {i}?", "output": ""} for i in range(24)]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        arguments = ["--data", str(data), "--max-new-tokens", "16"]
    campaign.command(
        "answers", campaign.model, "--out", str(own), "--device", campaign.device, *arguments
    )
    return {"records": len(own.read_text().splitlines()), "bytes": own.stat().st_size}


def training(method: str) -> Callable[[Campaign], dict[str, Any]]:
    """An accelerator on what `answers` has written so far, and what it gives."""

    def part(campaign: Campaign) -> dict[str, Any]:
        own, folder = campaign.out / "own.jsonl", campaign.out / "accelerators" / method
        steps = ["--steps", "4000", "--tokens-per-batch", "16384"]
        if campaign.tiny:
            steps = ["--steps", "1", "--tokens-per-batch", "128", "--max-length", "64"]
        if not (folder / "accelerator.json").is_file():
            arguments = ("--data", str(own), "--out", str(folder), "--method", method, *steps)
            campaign.command("train", campaign.model, *arguments)
        loaded = load_model(campaign.model, "bfloat16", campaign.device)
        engine = multirate.attach(loaded, folder)
        new = 8 if campaign.tiny else 128
        prompts = _prompts(campaign, engine, new)
        rows = _measured(campaign, engine, prompts, [PLAIN, engine.default], new)
        results = json.loads((folder / "accelerator.json").read_text()).get("results")
        return {"batches": rows, "training": results}

    return part


def experts(campaign: Campaign) -> dict[str, Any]:
    """A mixture whose experts come over PCIe from pinned memory, by every policy and budget."""
    folder, store, result = (campaign.out / n for n in ("mixture", "store", "experts.json"))
    base = load_model(campaign.model, "bfloat16", "cpu")
    if not (folder / "config.json").is_file():
        size = (64, 32, 2, 4) if campaign.tiny else (2048, 1024, 8, 16)
        config = OlmoeConfig(
            hidden_size=size[0],
            intermediate_size=size[1],
            num_hidden_layers=size[2],
            num_attention_heads=size[3],
            num_experts=8 if campaign.tiny else 64,
            num_experts_per_tok=2 if campaign.tiny else 8,
            vocab_size=base.model.config.vocab_size,
            max_position_embeddings=512,
        )
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        base.tokenizer.save_pretrained(folder)
    campaign.command("pack", str(folder), "--out", str(store))
    questions = campaign.out / "expert_questions.jsonl"
    questions.write_text('{"text": "Why is the sky blue, and why are sunsets red?"}\n')
    campaign.command(
        *("bench", str(folder), "--suite", "text", "--data", str(questions)),
        *("--experts", str(store), "--expert-memory", "50%" if campaign.tiny else "25%,50%"),
        *("--methods", "on_demand,lru", "-n", "4" if campaign.tiny else "96", "--repeats", "1"),
        *("--json", str(result)),
    )
    return json.loads(result.read_text())


PARTS: dict[str, tuple[float, Callable[[Campaign], dict[str, Any]]]] = {
    "correctness": (4, correctness),
    **{f"decoding {batch}": (3, decoding(batch)) for batch in BATCHES},
    "answers": (7, answers),
    **{f"training {method}": (4, training(method)) for method in METHODS},
    "shape 1b": (3, shape("1b")),
    "shape 7b": (5, shape("7b")),
    "experts": (4, experts),
}
"""Name → (share of the time, what it does)."""


def run(campaign: Campaign, minutes: float, names: list[str]) -> dict[str, Any]:
    """Every part that is not done, each within its share of what time is left → the results."""
    path = campaign.out / "campaign.json"
    content = json.loads(path.read_text()) if path.is_file() else {"parts": {}}
    driver = torch.version.cuda if campaign.device.startswith("cuda") else None
    content |= {**collect(campaign.device), "model": campaign.model, "cuda": driver}
    end = time.monotonic() + 60 * minutes
    waiting = [n for n in names if content["parts"].get(n, {}).get("status") != "done"]
    for index, name in enumerate(waiting):
        share, part = PARTS[name]
        began, left = time.monotonic(), end - time.monotonic()
        campaign.deadline = began + left * share / sum(PARTS[n][0] for n in waiting[index:])
        entry: dict[str, Any] = {}
        try:
            entry = {"status": "done", "result": part(campaign)}
        except Ended:
            entry = {"status": "out of time: run again to go on"}
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever it is, the next part has to run
            entry = {"status": "failed", "error": str(error)[:2000] or type(error).__name__}
            entry["traceback"] = traceback.format_exc()[-4000:]
        entry["seconds"] = round(time.monotonic() - began, 1)
        content["parts"][name] = entry
        write_json(path, content)
        print(f"{name}: {entry['status']} ({entry['seconds']} s)", flush=True)
    return content


def _tiny_model(folder: Path) -> str:
    sys.path.insert(0, str(ROOT / "tests"))
    from lab.bench.tiny_model import save

    if not (folder / "config.json").is_file():
        save(folder)
    AutoConfig.from_pretrained(folder)
    return str(folder)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=40, help="Time for all parts together.")
    parser.add_argument("--model", default="smollm2", help="Name, folder or hub id.")
    parser.add_argument("--out", type=Path, default=Path("campaign"), help="Kept: it is resumed.")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu (with --tiny).")
    parser.add_argument("--questions", type=Path, help="MT-Bench's (default: random tokens).")
    parser.add_argument(
        "--accelerator",
        type=Path,
        action="append",
        default=[],
        help="A folder; measured beside the packaged ones (repeatable).",
    )
    parser.add_argument("--only", action="append", choices=PARTS, help="A part (repeatable).")
    parser.add_argument("--tiny", action="store_true", help="Tiny random models, to try it out.")
    chosen = parser.parse_args()
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        device = str(find_device(chosen.device))
    except UserError as error:
        sys.exit(str(error))
    model = _tiny_model(out / "model") if chosen.tiny else chosen.model
    campaign = Campaign(
        model, device, out, chosen.tiny, chosen.questions, tuple(chosen.accelerator)
    )
    content = run(campaign, chosen.minutes, chosen.only or list(PARTS))
    sys.exit(any(part["status"] == "failed" for part in content["parts"].values()))


if __name__ == "__main__":
    main()
