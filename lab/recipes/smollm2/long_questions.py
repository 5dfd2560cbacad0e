"""Writes questions about long texts: requests for summaries, and questions to answer from
documents. An accelerator trained only on short questions drafts badly after long prompts.

    python lab/recipes/smollm2/long_questions.py --data DATA --out long.jsonl

DATA holds classic_books/ (public domain) and medquad/ (CC BY 4.0; Ben Abacha and Demner-Fushman,
BMC Bioinformatics 2019). The model then answers them (`multirate answers`).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

SUMMARIES = (
    "Summarize: {text}",
    "Summarize the following text in a few sentences.\n\n{text}",
    "{text}\n\nWrite a short summary of the text above.",
    "What happens in this passage?\n\n{text}",
    "Give the main points of this text:\n\n{text}",
)
ANSWERS = (
    "Answer the question from these documents.\n\n{text}\n\nQuestion: {question}",
    "{text}\n\nUsing the text above, answer this question: {question}",
    "Question: {question}\n\nReferences:\n{text}\n\nAnswer:",
)
LENGTHS = (1000, 3200)
"""Characters of a text, from and to."""


def cut(text: str, length: int) -> str:
    """The beginning of the text, about `length` characters, up to the end of a sentence."""
    text = " ".join(text[: length + 1].split())
    end = max(text.rfind(mark) for mark in (". ", '." ', "? ", "! "))
    return text[: end + 1] if end > length // 2 else text


def passage(book: str, draw: random.Random) -> str:
    """A passage of the book that begins with a paragraph."""
    length = draw.randint(*LENGTHS)
    begin = book.find("\n\n", draw.randrange(max(len(book) - length, 1)))
    return cut(book[max(begin, 0) :], length)


def documents(records: list[dict[str, str]], draw: random.Random) -> tuple[str, str]:
    """A question, and three documents of which one answers it."""
    chosen = draw.sample(records, 3)
    length = draw.randint(*LENGTHS) // 3
    asked = chosen[0]["question"]
    draw.shuffle(chosen)
    texts = (f"[{i}] {cut(record['answer'], length)}" for i, record in enumerate(chosen, start=1))
    return asked, "\n\n".join(texts)


def questions(data: Path, count: int, seed: int = 0) -> list[str]:
    """Half are summaries of passages, a quarter each summaries of and questions about documents."""
    draw = random.Random(seed)
    books = [path.read_text("utf-8") for path in sorted((data / "classic_books").glob("*/*.md"))]
    lines = (data / "medquad" / "medquad.jsonl").read_text("utf-8").splitlines()
    records = [record for line in lines if len((record := json.loads(line))["answer"]) > 300]
    chosen = []
    for i in range(count):
        if i % 2:
            text = passage(draw.choice(books), draw)
            chosen.append(draw.choice(SUMMARIES).format(text=text))
        elif i % 4:
            text = cut(draw.choice(records)["answer"], draw.randint(*LENGTHS))
            chosen.append(draw.choice(SUMMARIES).format(text=text))
        else:
            question, text = documents(records, draw)
            chosen.append(draw.choice(ANSWERS).format(text=text, question=question))
    draw.shuffle(chosen)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chosen = questions(arguments.data, arguments.count, arguments.seed)
    lines = [json.dumps({"instruction": text, "output": ""}) + "\n" for text in chosen]
    arguments.out.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} questions in {arguments.out}")


if __name__ == "__main__":
    main()
