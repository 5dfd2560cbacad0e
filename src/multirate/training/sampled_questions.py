"""Questions without a data set: user turns sampled from the model itself. [ours]

A chat model has read its own template so often that, given the template up to where a user's text
begins, it writes what a user would (as Magpie does, arXiv 2406.08464). The file holds one kept
question per line and the number of the sample it was, so an interrupted run is continued by the
same call: a sample depends on the model, the seed and its number alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from multirate.decoding.continuous import Finished, generate_continuously
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError, say_once
from multirate.io import parse_json
from multirate.loading.chat_template import apply_template
from multirate.runtime.decoder import Decoder
from multirate.training.question_filter import QuestionFilter
from multirate.training.record_file import Records, foreign, look_at

ROUND = 256
"""Samples of one temperature, and what the yield is judged by."""
LEAST_YIELD = 0.02
"""A round that keeps less than this share of its samples is the last, because the model repeats
itself.
"""
_PLACEHOLDER = "USERTEXT"


@dataclass(frozen=True)
class QuestionSettings:
    """How questions are sampled.

    temperatures: one per round, in turn. longest: tokens of a question; what has not ended by then
    is left out.
    """

    seed: int = 0
    temperatures: tuple[float, ...] = (1.0,)
    top_p: float = 0.95
    longest: int = 256

    def __post_init__(self) -> None:
        for number in range(len(self.temperatures)):  # wrong values are refused before any work
            self.sampling(number)

    def sampling(self, number: int) -> SamplingSettings:
        temperature = self.temperatures[number % len(self.temperatures)]
        return SamplingSettings(temperature=temperature, top_p=self.top_p, seed=self.seed)


@dataclass(frozen=True)
class UserTurn:
    """Where a user's text begins and ends in the model's chat template.

    prefix: token ids before it (a system turn, where the template adds one). ends: ids that end it;
    text_end: else the text that does. special: ids that no user writes.
    """

    prefix: tuple[int, ...]
    ends: tuple[int, ...]
    text_end: str | None
    special: frozenset[int]


def user_turn(tokenizer: Any, eos_token_ids: Sequence[int]) -> UserTurn:
    """Raises UserError for a tokenizer whose template does not say where a user's text is."""
    instead = "pass --data with questions instead of --questions"
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "the model's tokenizer has no chat template, so it is not known where a user's text "
            f"begins; {instead}"
        )
    asked = [{"role": "user", "content": _PLACEHOLDER}]
    options = {"tokenize": False, "add_generation_prompt": True}
    rendered = str(apply_template(tokenizer, asked, "--questions", **options))
    before, found, after = rendered.partition(_PLACEHOLDER)
    prefix = list(tokenizer(before, add_special_tokens=False)["input_ids"])
    if not found or not prefix:
        raise UserError(
            "the model's chat template has nothing before a user's text to continue from; "
            f"{instead}"
        )
    special = {int(token) for token in tokenizer.all_special_ids}
    special |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    following = list(tokenizer(after, add_special_tokens=False)["input_ids"])[:1]
    ends = tuple(dict.fromkeys([*eos_token_ids, *(t for t in following if t in special)]))
    text_end = None if special & set(following) else next(iter(after.split()), None)
    if not ends and text_end is None:
        raise UserError(
            f"the model's chat template does not show where a user's text ends; {instead}"
        )
    return UserTurn(tuple(prefix), ends, text_end, frozenset(special))


@dataclass
class Sampled:
    """questions: those kept, in order. samples: how many were drawn for them, in_this_call: by this
    call. left_out: reason → how many of these were left out.
    """

    questions: list[str]
    samples: int
    in_this_call: int
    left_out: Counter[str]


def sample_questions(
    decoder: Decoder,
    tokenizer: Any,
    count: int,
    path: str | Path,
    eos_token_ids: Sequence[int],
    model: str,
    settings: QuestionSettings | None = None,
    asked: Sequence[str] = (),
    batch: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> Sampled:
    """`count` different questions that the model asks itself; also written to the file `path`.

    model: identifies the model (its fingerprint); a file from another model or with other settings
    is rejected. asked: questions that exist already. Returns fewer, with a warning, if the model
    repeats itself. progress(kept, count). Raises UserError for a model without a usable chat
    template.
    """
    settings = settings or QuestionSettings()
    turn = user_turn(tokenizer, eos_token_ids)
    accepts = QuestionFilter(same_opening=max(2, count // 100))
    for text in asked:
        accepts.add(text)
    path = Path(path)
    made_by = {"model": model, **asdict(settings)}
    records, kept, samples = _look_at(path, made_by, accepts)
    began, found_in_round, left_out_before = samples, 0, accepts.left_out.copy()
    with records.append() as write:
        if not records.lines:
            write({"made_by": made_by})
        for finished in _samples(decoder, turn, settings, batch, began):
            if len(kept) >= count:
                break
            samples = finished.number + 1
            question = _text(finished, turn, tokenizer, accepts)
            if question is not None and accepts.keep(question):
                kept.append(question)
                found_in_round += 1
                write({"question": question, "sample": finished.number})
                if progress is not None:
                    progress(len(kept), count)
            if samples % ROUND == 0:
                if samples - began >= ROUND and found_in_round < LEAST_YIELD * ROUND:
                    why = (accepts.left_out - left_out_before).most_common()
                    reasons = ", ".join(f"{number} {reason}" for reason, number in why)
                    say_once(
                        f"continuing with {len(kept)} of {count} questions after {samples} "
                        f"samples: of the last {ROUND} samples only {found_in_round} were new "
                        f"({reasons})"
                    )
                    break
                found_in_round, left_out_before = 0, accepts.left_out.copy()
    return Sampled(kept[:count], samples, samples - began, accepts.left_out)


def _samples(
    decoder: Decoder, turn: UserTurn, settings: QuestionSettings, batch: int, start: int
) -> Iterator[Finished]:
    """Samples number `start`, `start` + 1, … without end, in this order."""
    stop = StopSettings(max_new_tokens=settings.longest, eos_token_ids=turn.ends)
    while True:
        number = start // ROUND
        prefixes = repeat(turn.prefix, (number + 1) * ROUND - start)
        answers = generate_continuously(
            decoder,
            partial(next, prefixes, None),
            batch,
            settings.sampling(number),
            stop,
            first_number=start,
        )
        waiting: dict[int, Finished] = {}
        for finished in answers:
            waiting[finished.number] = finished
            while start in waiting:
                yield waiting.pop(start)
                start += 1


def _text(
    finished: Finished, turn: UserTurn, tokenizer: Any, accepts: QuestionFilter
) -> str | None:
    """What the model wrote as a user; None, counted, where it did not end or is no user's text."""
    tokens = finished.tokens
    ended = finished.reason == "eos"
    if ended:
        tokens = tokens[:-1]
    if turn.special & set(tokens):
        accepts.left_out["template tokens"] += 1
        return None
    text = str(tokenizer.decode(tokens))
    if turn.text_end is not None and turn.text_end in text:
        text, ended = text[: text.index(turn.text_end)], True
    if not ended:
        accepts.left_out["not ended"] += 1
        return None
    return text.strip()


def _look_at(
    path: Path, made_by: dict[str, Any], accepts: QuestionFilter
) -> tuple[Records, list[str], int]:
    """What `path` holds, the questions in it and the next sample's number. Changes nothing."""
    what = "a question that this command sampled"
    first, other = '{"made_by": ', '{"question": '
    records = look_at(path, first.encode(), other.encode(), what)
    kept, following = [], 0
    for number, line in enumerate(records.lines, start=1):
        try:
            record = parse_json(line, path)
            found = record["made_by"] if number == 1 else (record["question"], record["sample"])
            following = 0 if number == 1 else int(found[1]) + 1
        except (UserError, ValueError, KeyError, TypeError):
            raise foreign(path, number, what) from None
        if number > 1:
            kept.append(str(found[0]))
            accepts.add(kept[-1])
        elif found != json.loads(json.dumps(made_by)):
            raise UserError(
                f"{path}: sampled from another model or with other settings; choose another "
                "--out or delete the file"
            )
    return records, kept, following
