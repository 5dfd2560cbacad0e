"""Turns the permissive training sets into token files and a tokenizer for pretrain.py.

    python lab/recipes/pretraining/prepare.py --data DATA --out runs/mixture/data

Sources (all permissive): classic_books (public domain; as prose and, by stories.py, as
conversations), gsm8k train (MIT), gpteacher roleplay (MIT), rasbt instruction data (Apache-2.0),
self_instruct seed tasks (Apache-2.0), MedQuAD (CC BY 4.0). The three instruction sets together are
the source "assistant". One document in 50, by a hash of its first line, is held out from the model
and its accelerators. ``chat.jsonl`` has the model's conversations, to train accelerators on.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from stories import Subjects, Turns, conversation_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, USER, ASSISTANT, END_OF_TURN = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] | trim + '<|end|>\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
HELD_OUT_EVERY = 50
FOLLOW_UPS = (
    "Rewrite your answer in fewer words.",
    "Explain that in simpler words.",
    "Give another example.",
    "Write the same as a list.",
    "Why is that so?",
    "Can you say more about this?",
    "Now write it as a letter.",
    "Take your previous answer and make it a short poem.",
    "What would happen if the opposite were true?",
    "Change the answer so that a child understands it.",
    "Write your answer again with more detail.",
    "Are there any exceptions?",
    "Summarize your answer in one sentence.",
    "Now describe it from another side.",
    "How would you check whether this is correct?",
    "Rewrite your response without using the same words twice.",
)
"""Second turns, ours."""


def held_out(text: str) -> bool:
    return zlib.crc32(text.encode()) % HELD_OUT_EVERY == 0


def clean(text: str) -> str:
    """Plain ASCII punctuation and single spaces: a small model should not spend capacity on
    variants.
    """
    text = (
        text.replace("\u2019", "'")
        .replace("\u2018", "'")
        .replace("\u201c", '"')
        .replace("\u201d", '"')
    )
    text = (
        text.replace("\u2014", "--")
        .replace("\u2013", "-")
        .replace("\u2026", "...")
        .replace("\xa0", " ")
    )
    text = re.sub(r"[ \t]+", " ", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


@dataclass(frozen=True)
class Document:
    """``key`` decides whether it is held out: a chat's first question, or the book chunk it is made
    of.
    """

    source: str
    text: str
    key: str
    title: str = ""
    author: str = ""


def conversation(turns: Turns) -> str:
    return "".join(f"<|{role}|>\n{content}{END_OF_TURN}\n" for role, content in turns)


def book_chunk(path: Path, paragraphs: list[str]) -> Document:
    text = "\n\n".join(paragraphs)
    return Document("books", text, text, path.stem, path.parent.name)


def books(root: Path) -> Iterator[Document]:
    """Books cut into documents of about 6,000 characters at paragraph ends, headers and rules
    dropped.
    """
    for path in sorted((root / "classic_books").glob("*/*.md")):
        text = clean(path.read_text(encoding="utf-8"))
        paragraphs = [
            p for p in text.split("\n\n") if not p.startswith("#") and not set(p) <= set("-*_ ")
        ]
        chunk: list[str] = []
        size = 0
        for paragraph in paragraphs:
            paragraph = " ".join(paragraph.split())
            chunk.append(paragraph)
            size += len(paragraph)
            if size > 6000:
                yield book_chunk(path, chunk)
                chunk, size = [], 0
        if chunk:
            yield book_chunk(path, chunk)


def stories(chunks: Sequence[Document]) -> tuple[list[Document], list[dict[str, Any]]]:
    """Conversations about the book chunks, as documents of the base and as records of the
    accelerators.
    """
    subjects = Subjects([chunk.text for chunk in chunks])
    documents, records = [], []
    for chunk in chunks:
        turns = conversation_of(chunk.text, chunk.title, chunk.author, subjects)
        if turns is None or not all(content.strip() for _, content in turns):
            continue
        documents.append(Document("stories", conversation(turns), chunk.key))
        messages = [{"role": role, "content": content} for role, content in turns]
        records.append({"key": chunk.key, "source": "stories", "messages": messages})
    return documents, records


def chats(root: Path) -> Iterator[tuple[str, str, str]]:
    """(source, user, assistant) of every permissive instruction set."""
    for line in (root / "gsm8k/train.jsonl").read_text().splitlines():
        row = json.loads(line)
        answer = re.sub(r"<<.*?>>", "", row["answer"]).replace("#### ", "The answer is ")
        yield "gsm8k", row["question"], answer
    for path in sorted((root / "gpteacher").glob("*.json")):
        for row in json.loads(path.read_text()):
            yield (
                "assistant",
                f"{row['instruction']}\n{row.get('input', '')}".strip(),
                row["response"],
            )
    for row in json.loads((root / "rasbt_instruct/instruction-data.json").read_text()):
        yield "assistant", f"{row['instruction']}\n{row['input']}".strip(), row["output"]
    for line in (root / "self_instruct_seed/seed_tasks.jsonl").read_text().splitlines():
        row = json.loads(line)
        for instance in row["instances"]:
            yield (
                "assistant",
                f"{row['instruction']}\n{instance['input']}".strip(),
                instance["output"],
            )
    for line in (root / "medquad/medquad.jsonl").read_text().splitlines():
        row = json.loads(line)
        answer = row["answer"].strip()
        if len(answer) > 1600:  # end long articles at a sentence
            answer = answer[:1600].rsplit(". ", 1)[0] + "."
        if len(answer) > 40:
            yield "medquad", row["question"].replace(" ?", "?").replace("(are)", "are"), answer


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT, USER, ASSISTANT, END_OF_TURN],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        bos_token=None,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def questions(records: Sequence[dict[str, Any]], rng: random.Random) -> Iterator[dict[str, Any]]:
    """What the accelerators' base is asked: every instruction once alone and once with a second
    turn, of the other sources as many as keep them a minority. Their answers are placeholders.
    """
    shares = {"assistant": 1.0, "stories": 0.4, "medquad": 0.2, "gsm8k": 0.1}
    for record in records:
        if rng.random() >= shares[record["source"]]:
            continue
        turns = record.get("messages") or [
            {"role": "user", "content": record["instruction"]},
            {"role": "assistant", "content": ""},
        ]
        yield {"messages": turns}
        if record["source"] == "assistant":
            follow_up = {"role": "user", "content": rng.choice(FOLLOW_UPS)}
            yield {"messages": [*turns, follow_up, {"role": "assistant", "content": ""}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=20260)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)

    sources: dict[str, list[Document]] = {
        "books": list(books(args.data)),
        "chat": [],
        "medquad": [],
    }
    records: list[dict[str, Any]] = []
    for source, user, assistant in chats(args.data):
        user, assistant = clean(user), clean(assistant)
        if not user or not assistant:
            continue
        group = "medquad" if source == "medquad" else "chat"
        sources[group].append(
            Document(source, conversation([("user", user), ("assistant", assistant)]), user)
        )
        records.append({"key": user, "source": source, "instruction": user, "output": assistant})
    for group in sources.values():
        rng.shuffle(group)
    rng.shuffle(records)

    sample = sources["chat"] * 2 + sources["medquad"] + sources["books"][::3]
    tokenizer = train_tokenizer((document.text for document in sample), args.vocab_size)
    tokenizer.save_pretrained(args.out / "tokenizer")
    told, told_records = stories(sources["books"])
    parts = {
        "books": sources["books"],
        "medquad": sources["medquad"],
        "stories": told,
        **{
            name: [d for d in sources["chat"] if d.source == name]
            for name in ("assistant", "gsm8k")
        },
    }
    for name, documents in parts.items():
        for split, keep in (("train", False), ("heldout", True)):
            part = [d.text for d in documents if held_out(d.key) is keep]
            ids: list[int] = []
            for encoding in tokenizer.backend_tokenizer.encode_batch(
                part, add_special_tokens=False
            ):
                ids.extend(encoding.ids)
                if name == "books":
                    ids.append(tokenizer.convert_tokens_to_ids(END_OF_TEXT))
            np.asarray(ids, dtype=np.uint16).tofile(args.out / f"{split}_{name}.bin")
            print(f"{split:8} {name:9} {len(part):6} documents {len(ids):9} tokens")
    records += told_records
    rng.shuffle(records)
    for split, keep in (("heldout_chat", True), ("chat", False)):
        with (args.out / f"{split}.jsonl").open("w") as handle:
            for record in records:
                if held_out(record["key"]) is keep:
                    handle.write(json.dumps({k: v for k, v in record.items() if k != "key"}) + "\n")
        with (args.out / ("heldout_questions.jsonl" if keep else "questions.jsonl")).open(
            "w"
        ) as handle:
            for question in questions([r for r in records if held_out(r["key"]) is keep], rng):
                handle.write(json.dumps(question) + "\n")


if __name__ == "__main__":
    main()
