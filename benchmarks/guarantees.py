"""Whether the guarantees that `multirate calibrate` stored are kept on fresh draws of prompts.

    python benchmarks/guarantees.py smollm2 --data spec_bench=question.jsonl \
        --json lab/results/guarantees_smollm2.json

--data SUITE=FILE: a suite of `multirate bench`, first turns; or FILE alone: what `calibrate` reads.

Each guarantee's settings answer `draws` times `size` prompts of every file, none twice; a draw
keeps the guarantee where on average at least the guaranteed share of an answer's tokens is the full
model's after the same text.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import multirate
from multirate import guarantee as guarantees
from multirate.errors import UserError
from multirate.lab.bench.suites import load_suite
from multirate.lab.calibration.measure import answers, read_prompts
from multirate.loading.chat_template import encode_chat
from multirate.methods.spec import find
from multirate.provenance import collect

SEED = 0


def kept_by_draw(losses: list[float], size: int) -> list[float]:
    """The share of tokens that each draw of `size` answers kept."""
    return [1 - sum(losses[i : i + size]) / size for i in range(0, len(losses), size)]


def prompts_of(engine: multirate.Engine, data: str, longest: int) -> list[list[int]]:
    """The token ids of `data`'s prompts, of at most `longest` tokens each, in random order."""
    suite, _, file = data.rpartition("=")
    if suite:
        turns = [question.turns[0] for question in load_suite(suite, file)]
        found = [encode_chat(engine.tokenizer, [{"role": "user", "content": t}]) for t in turns]
        found = [prompt for prompt in found if len(prompt) <= longest]
    else:
        found = read_prompts([file], engine.tokenizer, longest)
    random.Random(SEED).shuffle(found)
    return found


def measure(
    engine: multirate.Engine, accelerator: str, data: str, draws: int, size: int
) -> list[dict[str, Any]]:
    """A row per guarantee of the accelerator, all on the same prompts of `data`."""
    given, name = engine.accelerators[accelerator], Path(data.rpartition("=")[2]).name
    assert given.folder is not None
    prompts = prompts_of(engine, data, 1024)[: draws * size]
    if len(prompts) < draws * size:
        raise UserError(
            f"{name} has {len(prompts)} prompts; {draws} draws of {size} need {draws * size}"
        )
    rows = []
    for guarantee in guarantees.read(given.folder):
        step = find(given.method).make_step(engine.decoder, given, dict(guarantee.settings))
        stop = engine.stopping(guarantee.max_new_tokens)
        losses: list[float] = []
        for one in answers(engine.decoder, step, prompts, stop, batch=1):
            losses.append(one.loss)
            if len(losses) % size == 0:
                print(f"{name} {guarantee.quality}: {len(losses)} of {len(prompts)}", flush=True)
        kept = kept_by_draw(losses, size)
        rows.append(
            {
                "data": name,
                "quality": guarantee.quality,
                "confidence": guarantee.confidence,
                "threshold": guarantee.settings["exit_thresholds"],
                "draws": draws,
                "size": size,
                "kept": [round(share, 5) for share in kept],
                "draws_kept": sum(share >= guarantee.quality for share in kept),
                "mean": 1 - sum(losses) / len(losses),
            }
        )
        print(
            f"{name}: at least {guarantee.quality} guaranteed; kept in "
            f"{rows[-1]['draws_kept']} of {draws} draws, {rows[-1]['mean']:.4f} on average, "
            f"{min(kept):.4f} in the worst"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--data", required=True, action="append")
    parser.add_argument("--accelerator", "-a", default="m2r2-carry")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--size", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    engine = multirate.attach(arguments.model, arguments.accelerator)
    name = next(iter(engine.accelerators))
    rows = [
        row
        for data in arguments.data
        for row in measure(engine, name, data, arguments.draws, arguments.size)
    ]
    if arguments.json is not None:
        content = collect(engine.decoder.info.device, model=arguments.model, rows=rows, seed=SEED)
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
