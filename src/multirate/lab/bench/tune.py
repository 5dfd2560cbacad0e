"""Finds a method's fastest settings: all candidates on a few prompts, then the better half on more,
until one is left (successive halving [Jamieson, Talwalkar 2016]).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multirate.decoding.results import DecodeStats
from multirate.engine import Engine
from multirate.errors import UserError
from multirate.io import decoded, parse_json
from multirate.lab.bench.method_runs import speculation
from multirate.lab.bench.suites import READERS
from multirate.loading.chat_template import encode_chat
from multirate.methods.spec import PLAIN, MethodSpec, write_variant
from multirate.training.data import read_conversations

QUESTIONS = (
    "Explain to a child why the tide comes in twice a day.",
    "Write a short letter to a neighbour whose dog barks at night.",
    "Write a Python function that returns the longest common prefix of a list of words.",
    "A shop sells pens at 3 for 2 euros. How much do 21 pens cost? Show your steps.",
    "List ten things to pack for a weekend in the mountains.",
    "Summarise in two sentences: The old bridge was closed in March after cracks were found in two "
    "of its pillars. Engineers will replace both pillars by autumn; until then buses take the "
    "northern road, and the ferry runs every ten minutes instead of every twenty.",
    "What are the differences between a frog and a toad?",
    "Continue the story: The lighthouse had been dark for eleven years when, one night,",
    "Give me a recipe for lentil soup with quantities for four people.",
    "Rewrite politely: Send me the report today or I will tell your boss.",
    "Describe how a bicycle's gears work.",
    "Make a table of the four seasons with their months, weather and typical plants.",
)
"""From no benchmark, because tuning on a benchmark's questions would flatter its results."""
_WARM_UP = 12  # tokens, untimed: packs weights and measures costs
_WORTH = 1.01  # times the defaults' speed: less is noise, and the defaults stay
_BENCHMARK_FIELDS = {"turns", "task_id", "question_id", "instances", "idx", "canonical_solution"}


@dataclass
class Tried:
    """Settings with what they were measured at; seen: of each prompt, in the order of all others;
    rounds: how many rounds they lasted.
    """

    name: str
    settings: dict[str, Any]
    seen: list[DecodeStats] = field(default_factory=list)
    rounds: int = 0

    @property
    def prompts(self) -> int:
        return len(self.seen)

    @property
    def speed(self) -> float:
        return self.speed_of(self.prompts)

    def speed_of(self, prompts: int) -> float:
        seen = self.seen[:prompts]
        seconds = sum(one.seconds for one in seen)
        return sum(one.tokens for one in seen) / seconds if seconds else 0.0

    def figures(self, plain: Tried) -> dict[str, Any]:
        """For the file. plain: plain decoding, which answered the same prompts and others."""
        tokens = sum(one.tokens for one in self.seen)
        steps = sum(one.sequence_steps for one in self.seen)
        compared = plain.speed_of(self.prompts)
        return {
            "settings": self.settings,
            "tokens_per_second": round(self.speed, 2),
            "speedup": round(self.speed / compared, 3) if compared else None,
            "tokens_per_step": round(tokens / max(steps, 1), 3),
            "prompts": self.prompts,
        }


def candidates(known: MethodSpec) -> list[dict[str, Any]]:
    """The settings to try: the defaults ({}), then all combinations of the method's tunable values.
    UserError for a method without tunable settings.
    """
    if not known.tunable:
        raise UserError(f"method {known.name} has no settings to tune")
    defaults = known.read_settings()
    found: list[dict[str, Any]] = []
    for values in itertools.product(*known.tunable.values()):
        chosen = {
            name: value
            for name, value in zip(known.tunable, values, strict=True)
            if value != getattr(defaults, name)
        }
        if chosen not in found:
            found.append(chosen)
    return sorted(found, key=len)


def tune(
    run: Callable[[str, list[int], int | None], DecodeStats],
    name: str,
    choices: Sequence[Mapping[str, Any]],
    prompts: Sequence[list[int]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    on_round: Callable[[int, int, float], None] = lambda number, left, speed: None,
    drop: Callable[[str], None] = lambda name: None,
    beside: Sequence[str] = (),
) -> tuple[Tried, list[Tried], list[Tried]]:
    """The fastest settings; plain decoding and the methods `beside`, to compare with; and all
    settings that were tried, the fastest first.

    run(method, prompt, most tokens or None) decodes. Each round has the same share of `seconds`;
    all that are left, and those to compare with, answer the same prompts, one after the other in
    turns.
    The first choice, the defaults, stays to the end: another one has to be faster by 1%. Where the
    time is up after fewer rounds, the fastest so far is the best.
    """
    others = [Tried(other, {}) for other in (PLAIN, *beside)]
    tried = [Tried(write_variant(name, chosen), dict(chosen)) for chosen in choices]
    left = list(tried)
    rounds = max(1, math.ceil(math.log2(len(tried))))
    queue = itertools.cycle(prompts)
    begin = clock()
    for one in (*others, *left):
        run(one.name, prompts[0], _WARM_UP)
    begin_rounds = clock()
    seconds = max(seconds - (begin_rounds - begin), seconds / 2)
    for number in range(1, rounds + 1):
        until = begin_rounds + seconds * number / rounds
        while True:
            prompt = next(queue)
            turn = (*others, *left)
            first = others[0].prompts % len(turn)  # nobody is always the first
            for one in (*turn[first:], *turn[:first]):
                one.seen.append(run(one.name, prompt, None))
            if clock() >= until:
                break
        for one in left:
            one.rounds = number
        left.sort(key=lambda one: -one.speed)
        half = left[: max(1 if number == rounds else 2, math.ceil(len(left) / 2))]
        for one in left:
            if one not in half and one is not tried[0]:
                drop(one.name)
        left = half if tried[0] in half else [*half, tried[0]]
        on_round(number, len(left), left[0].speed)
        if clock() >= begin_rounds + seconds:
            break
    best = left[0] if left[0].speed > _WORTH * tried[0].speed else tried[0]
    tried.sort(key=lambda one: (one is not best, -one.rounds, -one.speed))
    return best, others, tried


def runner(
    engine: Engine, max_new_tokens: int
) -> Callable[[str, list[int], int | None], DecodeStats]:
    """Decodes a prompt anew with an engine, as `generate` does."""
    sampling = engine.sampling(seed=0)

    def run(method: str, prompt: list[int], most: int | None) -> DecodeStats:
        engine.forget()
        stop = engine.stopping(most or max_new_tokens)
        how = speculation(engine)
        return engine.generate([prompt], sampling, stop, method, speculate=how).stats

    return run


def tuning_prompts(tokenizer: Any, data: Path | None) -> list[list[int]]:
    """Prompts to tune on: the package's own questions, or those of a file in a form that `train`
    reads. UserError for a benchmark's file.
    """
    questions = dict.fromkeys(QUESTIONS, "the package's own question")
    if data is not None:
        _refuse_benchmark(data)
        questions = {}
        for one in read_conversations(data, answered=False):
            text = next((text for role, text in one.turns if role == "user"), one.text)
            if text.strip():
                questions.setdefault(text, one.where)
    if not questions:
        raise UserError(f"{data} has no prompts")
    return [
        encode_chat(tokenizer, [{"role": "user", "content": text}], where)
        for text, where in questions.items()
    ]


def _refuse_benchmark(path: Path) -> None:
    """UserError for a file that looks like one of the suites that `bench` reads."""
    try:
        with path.open("rb") as file:
            record = parse_json(decoded(file.readline(), path), path)
    except (OSError, UserError):
        return  # whoever reads it says what is wrong
    fields = set(record) if isinstance(record, dict) else set()
    gsm8k = fields == {"question", "answer"} and "####" in str(record["answer"])
    if gsm8k or fields & _BENCHMARK_FIELDS or path.stem.lower() in set(READERS) - {"text"}:
        raise UserError(
            f"{path} looks like a benchmark: tune on other prompts, else the benchmark's results "
            "are too good"
        )
