"""Training text that the base model wrote itself: its greedy answers to questions. [ours]

A draft must agree with what the model says, not with what a data set says. A record holds the text
and its token ids (own_tokens.py). The file grows one record at a time, so the same call continues
an interrupted run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multirate.decoding.continuous import generate_continuously
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError, say_once
from multirate.io import parse_json, spread
from multirate.runtime.decoder import Decoder
from multirate.training.data import normalised, read_conversations, render_prompt
from multirate.training.own_tokens import ANSWERS, MARK, Said, is_own, text_of
from multirate.training.record_file import Records, beginning_of, foreign, look_at

Turns = list[tuple[str, str]]


@dataclass(frozen=True)
class Questions:
    """The user turns of one conversation, and the system turn before them, if any. where: its file
    and line.
    """

    users: tuple[str, ...]
    system: str | None = None
    where: str = field(default="the questions", compare=False)

    def beginning(self) -> Turns:
        """The turns before the first question."""
        return [] if self.system is None else [("system", self.system)]


def read_questions(data_files: Sequence[str | Path], limit: int | None = None) -> list[Questions]:
    """The questions of the data's conversations, in order.

    Duplicates (by normalised text) appear once. limit: maximum number, spread evenly over the data.
    Raises UserError for unusable data.
    """
    conversations = [c for f in data_files for c in read_conversations(f, answered=False)]
    distinct: dict[tuple[str, ...], Questions] = {}
    silent = 0
    for asked in (_of_turns(c.turns, c.where) for c in conversations):
        silent += not asked.users
        if asked.users:
            key = tuple(map(normalised, (asked.system or "", *asked.users)))
            distinct.setdefault(key, asked)
    if silent and distinct:
        say_once(f"skipping {silent} of {len(conversations)} records without a user turn")
    questions = list(distinct.values())
    if not questions:
        names = ", ".join(str(f) for f in data_files)
        raise UserError(f"no user turns in {names}; accepted: chat or question records")
    return spread(questions, limit)


Answering = Callable[[Sequence[Questions], int], Iterator[tuple[Turns, list[Said]]]]
"""answering(questions, batch): each conversation once it has ended, in their order."""


def answer_questions(
    decoder: Decoder,
    tokenizer: Any,
    questions: Sequence[Questions],
    out: str | Path,
    eos_token_ids: Sequence[int],
    max_new_tokens: int = 160,
    batch: int = 16,
    progress: Callable[[int, int], None] | None = None,
    model: str = "",
    sampling: SamplingSettings | None = None,
    stop_strings: Sequence[str] = (),
    answering: Answering | None = None,
) -> int:
    """Writes conversations to `out`: the model answers every user turn, given its own earlier
    answers. Returns the number of records in the file.

    One {"instruction", "output"} line per conversation of one question, {"messages"} for several
    and for those with a system turn, in the order of the questions. Each also has "said": the token
    ids of every prompt and answer, and why the answer ended.

    batch: sequences decoded at once.
    progress(done, total): called after every answer.
    model: identifies the model (its fingerprint).
    sampling: default: greedy.
    stop_strings: strings that end an answer as well.
    answering: who answers, in the order of the questions; None: this decoder.

    Questions that leave no room in the context are skipped, and later turns without room end their
    conversation; a warning reports both. Raises UserError for an `out` that this function did not
    write, or that was made from other questions, by another model or with another max_new_tokens.
    """
    stop = StopSettings(max_new_tokens, tuple(eos_token_ids), tuple(stop_strings), tokenizer.decode)
    answerer = Answerer.of(decoder, tokenizer, stop, sampling)
    questions = answerer.answerable(questions)
    made_by = {MARK: ANSWERS, "model": model, "max_new_tokens": max_new_tokens}
    records = _look_at(Path(out), questions, made_by)
    done = len(records.lines)
    if progress is not None:
        progress(done, len(questions))
    with records.append() as write:
        for turns, said in (answering or answerer.answers)(questions[done:], batch):
            write(record(turns, said, made_by))
            done += 1
            if progress is not None:
                progress(done, len(questions))
    if answerer.ended_early:
        say_once(
            f"{answerer.ended_early} conversations were cut before their last question: the rest "
            f"{answerer.too_long}"
        )
    return len(questions)


def record(turns: Turns, said: Sequence[Said], made_by: dict[str, Any]) -> dict[str, Any]:
    """The line of a conversation."""
    if len(turns) == 2:
        text: dict[str, Any] = {"instruction": turns[0][1], "output": turns[1][1]}
    else:
        text = {"messages": [{"role": role, "content": content} for role, content in turns]}
    return {**made_by, **text, "said": [one.to_json() for one in said]}


@dataclass
class Answerer:
    """The model in conversation with several users at once."""

    decoder: Decoder
    tokenizer: Any
    stop: StopSettings
    positions: int
    sampling: SamplingSettings | None = None
    ended_early: int = field(default=0, init=False)
    """Conversations whose last questions were not asked."""

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        tokenizer: Any,
        stop: StopSettings,
        sampling: SamplingSettings | None,
    ) -> Answerer:
        return cls(decoder, tokenizer, stop, decoder.info.max_positions or 1 << 30, sampling)

    @property
    def too_long(self) -> str:
        """What a prompt without room for its answer does."""
        return (
            f"leaves no room for {self.stop.max_new_tokens} tokens in {self.decoder.info.context}"
        )

    def prompt(self, turns: Turns, where: str) -> list[int]:
        """The ids that the next answer follows. Raises UserError, begun by `where`, for turns that
        the chat template refuses.
        """
        text = render_prompt(self.tokenizer, turns, where)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def fits(self, prompt: Sequence[int]) -> bool:
        """Whether it leaves room for an answer."""
        return len(prompt) + (self.stop.max_new_tokens or 0) <= self.positions

    def answerable(self, questions: Sequence[Questions]) -> list[Questions]:
        """Those whose first question can be asked; the others are counted, and it is said why.
        Raises UserError where there are none.
        """
        kept, why = [], Counter[str]()
        for asked in questions:
            prompt = self.prompt([*asked.beginning(), ("user", asked.users[0])], asked.where)
            if prompt and self.fits(prompt):
                kept.append(asked)
            else:
                why[self.too_long if prompt else "has no tokens"] += 1
        reasons = "; ".join(
            f"{count} of {len(questions)}: it {what}" for what, count in why.items()
        )
        if why and not kept:
            raise UserError(f"no question can be answered ({reasons})")
        if why:
            say_once(f"skipping questions ({reasons})")
        return kept

    def answers(
        self, questions: Sequence[Questions], batch: int
    ) -> Iterator[tuple[Turns, list[Said]]]:
        """Each conversation once it has ended, in the order of the questions."""
        conversations = [asked.beginning() for asked in questions]
        said: list[list[Said]] = [[] for _ in questions]
        waiting = deque[tuple[int, list[int]]]()  # conversations that go on, and their prompts
        coming = iter(range(len(questions)))
        asked: list[tuple[int, list[int]]] = []  # the same of all that were taken, in order

        def next_prompt() -> list[int] | None:
            if not waiting and (index := next(coming, None)) is not None:
                turn(index)
            if not waiting:
                return None
            asked.append(waiting.popleft())
            return asked[-1][1]

        def turn(index: int) -> bool:
            """Puts a conversation's next question; False where it has none, or no room for it."""
            users, number = questions[index].users, len(said[index])
            if number == len(users):
                return False
            prompt = self.prompt(
                [*conversations[index], ("user", users[number])], questions[index].where
            )
            if not self.fits(prompt):
                self.ended_early += 1
                return False
            waiting.append((index, prompt))
            return True

        ended: set[int] = set()
        written = 0
        for finished in generate_continuously(
            self.decoder, next_prompt, batch, self.sampling, self.stop
        ):
            index, prompt = asked[finished.number]
            question = questions[index].users[len(said[index])]
            text = text_of(self.tokenizer, finished.tokens)
            conversations[index] += [("user", question), ("assistant", text)]
            said[index].append(Said.of(prompt, finished.tokens, finished.reason))
            if not turn(index):
                ended.add(index)
            while written in ended:
                yield conversations[written], said[written]
                written += 1


def _asked(record: dict[str, Any]) -> Questions:
    """The questions of a record that this module wrote."""
    if "messages" in record:
        return _of_turns([(one["role"], one["content"]) for one in record["messages"]])
    return Questions((record["instruction"],))


def _of_turns(turns: Sequence[tuple[str, str]], where: str = "") -> Questions:
    system = turns[0][1] if turns and turns[0][0] == "system" else None
    return Questions(tuple(text for role, text in turns if role == "user"), system, where)


_WHAT = "a record of this command"


def look_for_records(path: str | Path) -> Records:
    """The content of an `out` of answer_questions, unchanged. Raises UserError for a file with
    another beginning.
    """
    beginning = beginning_of({MARK: ANSWERS})
    return look_at(Path(path), beginning, beginning, _WHAT)


def _look_at(path: Path, questions: Sequence[Questions], made_by: dict[str, Any]) -> Records:
    """The records that `path` holds already, each of them compared. Changes nothing."""
    records = look_for_records(path)
    for number, line in enumerate(records.lines, start=1):
        try:
            found = parse_json(line, path)
            asked = _asked(found)
        except (UserError, KeyError, TypeError, IndexError):
            raise foreign(path, number, _WHAT) from None
        if not is_own(found) or not asked.users:
            raise foreign(path, number, _WHAT)
        for name in ("model", "max_new_tokens"):
            if found.get(name) != made_by[name]:
                raise UserError(
                    f"{path}, line {number}: made with another {name} ({found.get(name)} instead "
                    f"of {made_by[name]}); choose another --out or delete the file"
                )
        wanted = questions[number - 1] if number <= len(questions) else None
        count = len(asked.users)
        if wanted is not None and asked != Questions(wanted.users[:count], wanted.system):
            raise UserError(
                f"{path}, line {number}: made from other questions; choose another --out or "
                "delete the file"
            )
    if len(records.lines) > len(questions):
        raise UserError(
            f"{path} holds {len(records.lines)} records for {len(questions)} questions; choose "
            "another --out"
        )
    return records
