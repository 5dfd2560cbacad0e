"""Conversations made from public-domain books: the answers are an author's prose, the questions are
ours.

A small model learns most of its English from prose; asked in chat form, the same prose teaches it
to answer requests with whole, grammatical paragraphs. Each book chunk gives one conversation; its
kind, and all else, follows from the chunk's own bytes, so a rerun makes the same file.
"""

from __future__ import annotations

import random
import re
import zlib
from collections import Counter
from collections.abc import Sequence

Turns = list[tuple[str, str]]
SUBJECTS = 3


def until(text: str, size: int) -> str:
    """The longest beginning of ``text`` of at most ``size`` characters that ends a sentence ("" if
    there is none).
    """
    end = 0
    for match in re.finditer(r'[.!?]["\')]*(?=\s)', text[: size + 2]):
        end = match.end()
    return text[:end]


class Subjects:
    """Words that tell a passage from the others: frequent in it, rare among all chunks."""

    def __init__(self, chunks: Sequence[str]) -> None:
        self.seen = Counter(word for chunk in chunks for word in set(self.words(chunk)))

    @staticmethod
    def words(text: str) -> list[str]:
        return re.findall(r"(?<=\bthe |..\ba )[a-z]{4,}\b", text)

    def of(self, passage: str) -> list[str]:
        counts = Counter(self.words(passage))
        rank = {
            word: n / (20 + self.seen[word]) for word, n in counts.items() if self.seen[word] > 5
        }
        return sorted(rank, key=lambda word: (-rank[word], word))[:SUBJECTS]


def conversation_of(chunk: str, title: str, author: str, subjects: Subjects) -> Turns | None:
    """One conversation about the passage a chunk begins with, or None if it has no clean
    sentences.
    """
    rng = random.Random(zlib.crc32(chunk.encode()))
    opening = until(chunk, rng.choice((250, 400, 600)))
    passage = until(chunk, rng.choice((500, 900, 1400)))
    following = chunk[len(opening) :].strip()
    words = subjects.of(passage)
    if len(opening) < 60 or len(passage) < 200 or len(words) < SUBJECTS:
        return None
    a, b, c = words
    kind = rng.randrange(10)
    if kind < 3:
        ask = rng.choice(
            (
                f"Write a short story about a {a}, a {b} and a {c}.",
                f"Tell me a story. It should mention a {a}, a {b} and a {c}.",
                f"Describe a scene with a {a} and a {b}.",
                f"Write a passage about a {a} in the style of {author}.",
                f"Write a few paragraphs that contain the words {a}, {b} and {c}.",
            )
        )
        return [("user", ask), ("assistant", passage)]
    if kind < 5:
        ask = rng.choice(
            (
                "Continue this story:",
                "What happens next?",
                "Write the next paragraphs of this text:",
                "Here is the beginning of a story. Please go on.",
            )
        )
        return [("user", f"{ask}\n{opening}"), ("assistant", until(following, 900))]
    if kind == 5:
        ask = rng.choice(
            (
                "Who wrote this?",
                "Which book is this from?",
                "Name the author and the title of this text:",
            )
        )
        return [
            ("user", f"{ask}\n{opening}"),
            ("assistant", f'This is from "{title}" by {author}.'),
        ]
    if kind == 6:
        worn = re.sub(r"[^a-z0-9' \n-]", "", opening.lower())
        ask = rng.choice(
            (
                "Correct the punctuation and the capital letters:",
                "Edit this text so that it is correct:",
            )
        )
        return [("user", f"{ask}\n{worn}"), ("assistant", opening)]
    if kind == 7:
        names = list(
            dict.fromkeys(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{2,}(?: [A-Z][a-z]+)?", opening))
        )
        if names:
            ask = rng.choice(
                ("List the names in this text:", "Extract all names from the following text:")
            )
            return [
                ("user", f"{ask}\n{opening}"),
                ("assistant", "\n".join(f"- {name}" for name in names)),
            ]
    ask = rng.choice(
        (
            f"Tell me about the {a} and the {b}.",
            f'Write a story with the title "The {a.capitalize()}".',
            f"Imagine that you are {author}. Write about a {a}.",
        )
    )
    more = rng.choice(
        ("Go on.", "What happened then?", "Continue, please.", "Write another paragraph.")
    )
    return [
        ("user", ask),
        ("assistant", opening),
        ("user", more),
        ("assistant", until(following, 700)),
    ]
