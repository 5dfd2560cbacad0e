"""Training text that the base model wrote itself: its greedy answers to questions.
[ours]

A draft has to agree with what the model says, not with what a data set says. The file is written
one record at a time, so an interrupted run is continued by the same call.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multirate.decoding.continuous import generate_continuously
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.io import parse_json, spread, whole_lines
from multirate.model.decoder import Decoder
from multirate.training.data import normalised, read_conversations, render_prompt

Turns = list[tuple[str, str]]


@dataclass(frozen=True)
class Questions:
    """The user turns of one conversation, and the system turn before them, where it has one."""

    users: tuple[str, ...]
    system: str | None = None

    def beginning(self) -> Turns:
        """The turns before the first question."""
        return [] if self.system is None else [("system", self.system)]


def read_questions(data_files: Sequence[str | Path], limit: int | None = None) -> list[Questions]:
    """The questions of the data's conversations, in its order.

    Equal ones (normalised text) come once. limit: at most so many, spread evenly over the data.
    Raises UserError for unusable data.
    """
    conversations = [c.turns for f in data_files for c in read_conversations(f, answered=False)]
    distinct: dict[tuple[str, ...], Questions] = {}
    for asked in map(_of_turns, conversations):
        if asked.users:
            key = tuple(map(normalised, (asked.system or "", *asked.users)))
            distinct.setdefault(key, asked)
    questions = list(distinct.values())
    if not questions:
        names = ", ".join(str(f) for f in data_files)
        raise UserError(f"no user turns in {names}; accepted are chat or question records")
    return spread(questions, limit)


def answer_questions(
    decoder: Decoder,
    tokenizer: Any,
    questions: Sequence[Questions],
    out: str | Path,
    eos_token_ids: Sequence[int],
    max_new_tokens: int = 160,
    batch: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Writes conversations to `out`, every user turn answered by the model after its own earlier
    answers.

    One {"instruction", "output"} line per conversation of one question, {"messages"} for several
    and for those with a system turn, in the order of the questions. batch: sequences decoded at
    once. progress(done, total). Returns the number of records in the file. Questions that leave no
    room in the context are left out; later turns without room end their conversation. Raises
    UserError for an `out` that was made from other questions.
    """
    room = (decoder.info.max_positions or 1 << 30) - max_new_tokens
    answerer = _Answerer(
        decoder,
        tokenizer,
        StopSettings(max_new_tokens=max_new_tokens, eos_token_ids=tuple(eos_token_ids)),
        room,
    )
    questions = [
        asked
        for asked in questions
        if answerer.prompt([*asked.beginning(), ("user", asked.users[0])])
    ]
    path = Path(out)
    done = _resume(path, questions)
    if progress is not None:
        progress(done, len(questions))
    try:
        with path.open("a", encoding="utf-8") as handle:
            for turns in answerer.answers(questions[done:], batch):
                handle.write(json.dumps(_record(turns)) + "\n")
                handle.flush()
                done += 1
                if progress is not None:
                    progress(done, len(questions))
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

    def answers(self, questions: Sequence[Questions], batch: int) -> Iterator[Turns]:
        """Each conversation once it has ended, in the order of the questions."""
        conversations = [asked.beginning() for asked in questions]
        answered = [0] * len(questions)
        waiting = deque[tuple[int, list[int]]]()  # conversations that go on, and their prompts
        coming = iter(range(len(questions)))
        asked: list[int] = []  # the conversation of each prompt, in the order they were taken

        def next_prompt() -> list[int] | None:
            if not waiting and (index := next(coming, None)) is not None:
                turn(index)
            if not waiting:
                return None
            index, prompt = waiting.popleft()
            asked.append(index)
            return prompt

        def turn(index: int) -> bool:
            """Puts a conversation's next question; False where it has none, or no room for it."""
            users = questions[index].users
            if answered[index] == len(users):
                return False
            prompt = self.prompt([*conversations[index], ("user", users[answered[index]])])
            if prompt is not None:
                waiting.append((index, prompt))
            return prompt is not None

        ended: set[int] = set()
        written = 0
        for finished in generate_continuously(self.decoder, next_prompt, batch, stop=self.stop):
            index = asked[finished.number]
            question = questions[index].users[answered[index]]
            answered[index] += 1
            text = self.tokenizer.decode(finished.tokens, skip_special_tokens=True).strip()
            conversations[index] += [("user", question), ("assistant", text or " ")]
            if not turn(index):
                ended.add(index)
            while written in ended:
                yield conversations[written]
                written += 1


def _record(turns: Turns) -> dict[str, Any]:
    if len(turns) == 2:
        return {"instruction": turns[0][1], "output": turns[1][1]}
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def _asked(record: dict[str, Any]) -> Questions:
    """The questions of a record that this module wrote."""
    if "messages" in record:
        return _of_turns([(one["role"], one["content"]) for one in record["messages"]])
    return Questions((record["instruction"],))


def _of_turns(turns: Sequence[tuple[str, str]]) -> Questions:
    system = turns[0][1] if turns and turns[0][0] == "system" else None
    return Questions(tuple(text for role, text in turns if role == "user"), system)


def _resume(path: Path, questions: Sequence[Questions]) -> int:
    """How many records `path` holds already; cuts off a half-written last line."""
    if not path.exists():
        return 0
    whole = whole_lines(path)
    for number, (line, asked) in enumerate(zip(whole, questions, strict=False), start=1):
        try:
            found = _asked(parse_json(line, path))
        except (UserError, KeyError, TypeError):
            raise UserError(
                f"{path}, line {number}: not a record of this command; choose another --out"
            ) from None
        count = len(found.users)
        if not count or found != Questions(asked.users[:count], asked.system):
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
