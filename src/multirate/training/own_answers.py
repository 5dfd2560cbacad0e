"""Training text that the base model wrote itself: its greedy answers to the data's questions.
[ours]

A draft has to agree with what the model says, not with what a data set says. The file is written
one record at a time, so an interrupted run is continued by the same call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.io import parse_json, write_atomically
from multirate.model.decoder import Decoder
from multirate.training.data import normalised, read_conversations, render_prompt

Turns = list[tuple[str, str]]
Questions = tuple[str, ...]
"""The user turns of one conversation."""


def answer_questions(
    decoder: Decoder,
    tokenizer: Any,
    data_files: Sequence[str | Path],
    out: str | Path,
    eos_token_ids: Sequence[int],
    max_new_tokens: int = 160,
    limit: int | None = None,
    batch: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Writes the data's conversations to `out`, every user turn answered by the model after its own
    earlier answers.

    One {"instruction", "output"} line per conversation of one turn, {"messages"} for several. Equal
    questions (normalised text) are asked once. limit: at most so many conversations, spread evenly
    over the data. progress(done, total). Returns the number of records in the file. Questions that
    leave no room in the context are left out; later turns without room end their conversation.
    Raises UserError for unusable data or an `out` that was made from other questions.
    """
    conversations = [c.turns for f in data_files for c in read_conversations(f)]
    asked = [tuple(text for role, text in turns if role == "user") for turns in conversations]
    distinct: dict[Questions, Questions] = {}
    for users in asked:
        if users:
            distinct.setdefault(tuple(map(normalised, users)), users)
    questions = list(distinct.values())  # in the data's order
    if not questions:
        names = ", ".join(str(f) for f in data_files)
        raise UserError(f"no user turns in {names}; accepted are chat or question records")
    if limit is not None and limit < len(questions):
        questions = [questions[i * len(questions) // limit] for i in range(limit)]
    room = (decoder.info.max_positions or 1 << 30) - max_new_tokens
    answerer = _Answerer(
        decoder,
        tokenizer,
        StopSettings(max_new_tokens=max_new_tokens, eos_token_ids=tuple(eos_token_ids)),
        room,
    )
    questions = [users for users in questions if answerer.prompt([("user", users[0])])]
    path = Path(out)
    done = _resume(path, questions)
    try:
        with path.open("a", encoding="utf-8") as handle:
            for start in range(done, len(questions), batch):
                for turns in answerer.answer(questions[start : start + batch]):
                    handle.write(json.dumps(_record(turns)) + "\n")
                handle.flush()
                if progress is not None:
                    progress(min(start + batch, len(questions)), len(questions))
    except OSError as error:
        raise UserError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from None
    return len(questions)


@dataclass
class _Answerer:
    """The model in conversation with several users at once."""

    decoder: Decoder
    tokenizer: Any
    stop: StopSettings
    room: int

    def prompt(self, turns: Turns) -> list[int] | None:
        """The ids that the next answer follows; None when there are none, or more than leave room
        for it.
        """
        ids = list(
            self.tokenizer(render_prompt(self.tokenizer, turns), add_special_tokens=False)[
                "input_ids"
            ]
        )
        return ids if 0 < len(ids) <= self.room else None

    def answer(self, questions: Sequence[Questions]) -> list[Turns]:
        conversations: list[Turns] = [[] for _ in questions]
        for turn in range(max(len(users) for users in questions)):
            waiting: list[tuple[Turns, str, list[int]]] = []
            for turns, users in zip(conversations, questions, strict=True):
                if (
                    turn < len(users) and len(turns) == 2 * turn
                ):  # else an earlier turn found no room
                    prompt = self.prompt([*turns, ("user", users[turn])])
                    if prompt is not None:
                        waiting.append((turns, users[turn], prompt))
            answers = generate(
                self.decoder, PlainStep(), [ids for _, _, ids in waiting], stop=self.stop
            ).sequences
            for (turns, question, _), answer in zip(waiting, answers, strict=True):
                text = self.tokenizer.decode(answer, skip_special_tokens=True).strip()
                turns += [("user", question), ("assistant", text or " ")]
        return conversations


def _record(turns: Turns) -> dict[str, Any]:
    if len(turns) == 2:
        return {"instruction": turns[0][1], "output": turns[1][1]}
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def _asked(record: dict[str, Any]) -> Questions:
    """The user turns of a record that this module wrote."""
    if "messages" in record:
        return tuple(m["content"] for m in record["messages"] if m["role"] == "user")
    return (record["instruction"],)


def _resume(path: Path, questions: Sequence[Questions]) -> int:
    """How many records `path` holds already; cuts off a half-written last line."""
    if not path.exists():
        return 0
    lines = path.read_bytes().split(b"\n")
    whole, rest = lines[:-1], lines[-1]
    if rest:
        write_atomically(path, b"".join(line + b"\n" for line in whole))
    for number, (line, users) in enumerate(zip(whole, questions, strict=False), start=1):
        try:
            found = _asked(parse_json(line, path))
        except (UserError, KeyError, TypeError):
            raise UserError(
                f"{path}, line {number}: not a record of this command; choose another --out"
            ) from None
        if not found or found != users[: len(found)]:
            raise UserError(
                f"{path}, line {number}: made from other questions; choose another --out or delete "
                "it"
            )
    if len(whole) > len(questions):
        raise UserError(
            f"{path} holds {len(whole)} records for {len(questions)} questions; choose another "
            "--out"
        )
    return len(whole)
