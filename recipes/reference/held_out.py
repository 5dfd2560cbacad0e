"""Measure a trained accelerator again on held-out answers, and write the figures into its folder.

    python recipes/reference/held_out.py --model src/multirate/reference/model \
        --accelerator src/multirate/reference/accelerators/m2r2 --heldout heldout_own.jsonl \
        --trained runs/reference/data/questions.jsonl --trained runs/reference/data/chat.jsonl

Held-out samples whose normalised first question is in a file of --trained are left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator as Launcher
from multirate.methods.trained import trained_method

from multirate.methods.common.teacher import Teacher
from multirate.training.checkpoint import CARD, DESCRIPTION, Accelerator, write_atomically
from multirate.training.data import load_samples, prompt_of, read_conversations
from multirate.training.loop import evaluate, load_base
from multirate.training.model_card import model_card


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--accelerator", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--trained", type=Path, action="append", required=True)
    args = parser.parse_args()
    model, tokenizer = load_base(args.model, torch.bfloat16)
    trained = {prompt_of(c) for path in args.trained for c in read_conversations(path)}
    given = load_samples([args.heldout], tokenizer, 512)
    heldout = [s for s in given if s.prompt not in trained]
    accelerator = Accelerator.from_pretrained(args.accelerator, model, torch.float32)
    objective = trained_method(accelerator.method).objective(
        Teacher(model), accelerator.module, 0.8
    )
    with torch.autocast("cpu", torch.bfloat16):
        results = evaluate(objective, heldout, 4096, Launcher(cpu=True))
    path = args.accelerator / DESCRIPTION
    description = json.loads(path.read_text())
    description["results"] = results
    write_atomically(args.accelerator / CARD, model_card(description).encode())
    write_atomically(path, (json.dumps(description, indent=2) + "\n").encode())
    print(
        f"{args.accelerator}: {len(heldout)} of {len(given)} samples, {results['rows']} rows, "
        f"{[term['agreement'] for term in results['terms']]}"
    )


if __name__ == "__main__":
    main()
