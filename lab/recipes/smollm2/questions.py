"""Writes the questions for training SmolLM2's accelerators, from permissive sets, each question
once.

    python lab/recipes/smollm2/questions.py --data DATA --out questions.jsonl

DATA holds gpteacher/ and gsm8k/ (MIT), rasbt_instruct/ and self_instruct_seed/ (Apache-2.0) and
medquad/ (CC BY 4.0; Ben Abacha and Demner-Fushman, BMC Bioinformatics 2019). Only the questions
are used; the model then answers them (`multirate answers`).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from multirate.training.data import normalised, read_conversations

SOURCES = {
    "gpteacher/roleplay-simple-deduped-roleplay-instruct.json": 1900,
    "rasbt_instruct/instruction-data.json": 1100,
    "self_instruct_seed/seed_tasks.jsonl": 200,
    "medquad/medquad.jsonl": 900,
    "gsm8k/train.jsonl": 1100,
}
"""File → the largest number of its questions."""
LONGEST = 1200
"""Characters of a question."""


def questions(data: Path, seed: int = 0, all_of_them: bool = False) -> list[str]:
    """All sources' questions in a random order, so that any beginning of it is a mixture.
    all_of_them: no source's number of them is limited.
    """
    draw = random.Random(seed)
    chosen: list[str] = []
    seen: set[str] = set()
    for name, most in SOURCES.items():
        found = []
        for conversation in read_conversations(data / name):
            asked = next((text for role, text in conversation.turns if role == "user"), "")
            if asked and len(asked) < LONGEST and normalised(asked) not in seen:
                seen.add(normalised(asked))
                found.append(asked)
        draw.shuffle(found)
        chosen += found if all_of_them else found[:most]
    draw.shuffle(chosen)
    return chosen


def further_questions(data: Path) -> list[str]:
    """The questions that `questions` leaves out."""
    asked = set(questions(data))
    return [text for text in questions(data, all_of_them=True) if text not in asked]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--further", type=int, help="write this many of the left-out questions")
    arguments = parser.parse_args()
    chosen = questions(arguments.data)
    if arguments.further is not None:
        chosen = further_questions(arguments.data)[: arguments.further]
    lines = [json.dumps({"instruction": text, "output": ""}) + "\n" for text in chosen]
    arguments.out.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} questions in {arguments.out}")


if __name__ == "__main__":
    main()
