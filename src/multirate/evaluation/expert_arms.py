"""All ways of loading experts on the same tokens: arms interleaved, every token compared, each budget in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from multirate.engine import PLAIN, Engine
from multirate.evaluation.prompts import Prompt
from multirate.experts.arms import ARMS, arm
from multirate.experts.model import OffloadedExperts
from multirate.experts.policies import Belady, EvictionPolicy, eviction_policy
from multirate.experts.predictors import Oracle, Predictor
from multirate.experts.runtime import ExpertRuntime, ExpertSettings
from multirate.experts.slot_cache import Key
from multirate.experts.stats import Event

Trace = list[tuple[int, list[int]]]
RESIDENT = "resident"
BOUNDS = ("oracle", "belady", RESIDENT)
ALL_ARMS = (*ARMS, *BOUNDS)


@dataclass
class ExpertRow:
    """One arm at one budget. Rates are total tokens over total time, prompts included, of the median repeat.

    hit_rate: needs that the cache alone served. prefetch_recall: share of the others whose read was issued ahead of
    time; prefetch_precision: share of those reads that were needed. late: needed while its read was queued or running;
    wasted: evicted unused. bytes_per_token, stall_ms, predictor_ms: per new token. speedup: against on_demand.
    """

    method: str
    expert_memory_bytes: int
    tokens: int
    seconds: float
    tokens_per_second: float
    spread: float
    hit_rate: float
    prefetch_recall: float
    prefetch_precision: float
    late: int
    wasted: int
    bytes_per_token: float
    demand_bytes_per_token: float
    stall_ms: float
    predictor_ms: float
    identical: bool
    speedup: float | None = None
    seconds_per_repeat: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The fields, JSON-ready."""
        return asdict(self)


@dataclass
class ExpertRun:
    """Rows, and the timeline of one token for each arm (of the first budget measured)."""

    rows: list[ExpertRow]
    timelines: dict[str, list[Event]]
    interrupted: bool = False


class _Contestant:
    """An arm with a runtime of its own, whose cache lives through the whole run."""

    def __init__(self, offload: OffloadedExperts, name: str, settings: ExpertSettings, traces: Sequence[Trace],
                 order: Sequence[int]) -> None:  # fmt: skip
        self.name, self._traces = name, traces
        self.samples: list[list[tuple[list[int], float]]] = []
        eviction: EvictionPolicy | None = None
        if name == "belady":
            keys: list[Key] = [(row, e) for index in order for row, experts in traces[index] for e in experts]
            eviction = Belady(keys)
        elif name not in ARMS:
            eviction = eviction_policy("least_stale")
        else:
            eviction = eviction_policy(arm(name).eviction)
        self.predictor: Predictor | None = offload.predictor(arm(name).predictor) if name in ARMS else None
        if name == RESIDENT:
            settings = ExpertSettings(None, direct=settings.direct)
        self.runtime = ExpertRuntime(offload.store, settings, self.predictor, eviction)

    def ready(self, index: int) -> None:
        """Before prompt `index`: the oracle opens its book at the page."""
        if self.name == "oracle":
            self.runtime.predictor = Oracle(self._traces[index])


def measure_arms(
    engine: Engine,
    prompts: Sequence[Prompt],
    names: Sequence[str],
    budgets: Sequence[int],
    settings: Callable[[int], ExpertSettings],
    *,
    max_new_tokens: int,
    repeats: int,
    on_answer: Callable[[], None] | None = None,
) -> ExpertRun:
    """Every arm on every prompt at every budget. settings(budget): how a runtime of that budget reads.

    The true tokens and needs are recorded with all experts resident first. One prompt warms each arm up. Ctrl-C ends
    the run with the budgets that are complete.
    """
    offload = engine.experts
    assert offload is not None
    stop = engine.stopping(max_new_tokens)
    advance = on_answer or (lambda: None)

    def answer(runtime: ExpertRuntime, prompt: Prompt) -> tuple[list[int], float]:
        offload.runtime = runtime
        engine.forget()
        began = time.perf_counter()
        tokens = engine.generate([prompt.tokens], stop=stop, method=PLAIN).sequences[0]
        return tokens, time.perf_counter() - began

    result = ExpertRun([], {})
    first = offload.runtime
    with ExpertRuntime(offload.store) as resident:
        truth, traces = [], []
        for prompt in prompts:
            resident.trace = []
            truth.append(answer(resident, prompt)[0])
            traces.append(resident.trace)
    order = [0, *(index for _ in range(repeats) for index in range(len(prompts)))]
    try:
        for budget in budgets:
            arms = [_Contestant(offload, name, settings(budget), traces, order) for name in names]
            try:
                for contestant in arms:
                    if contestant.name == RESIDENT:
                        contestant.runtime.preload()
                    contestant.ready(0)
                    answer(contestant.runtime, prompts[0])
                    contestant.runtime.reset()
                for repeat in range(repeats):
                    for contestant in arms:
                        contestant.samples.append([])
                    for index, prompt in enumerate(prompts):
                        turn = (repeat + index) % len(arms)
                        for contestant in [*arms[turn:], *arms[:turn]]:
                            contestant.ready(index)
                            contestant.samples[-1].append(answer(contestant.runtime, prompt))
                            advance()
                rows = [_row(contestant, budget, truth) for contestant in arms]
                _speedups(rows)
                result.rows += rows
                if not result.timelines:
                    for contestant in arms:
                        contestant.ready(0)
                        contestant.runtime.reset(events=True)
                        answer(contestant.runtime, prompts[0])
                        result.timelines[contestant.name] = _last_token(contestant.runtime.stats.events or [])
            finally:
                for contestant in arms:
                    contestant.runtime.close()
    except KeyboardInterrupt:
        result.interrupted = True
    finally:
        offload.runtime = first
    return result


def _row(contestant: _Contestant, budget: int, truth: Sequence[list[int]]) -> ExpertRow:
    seconds = [sum(second for _, second in repeat) for repeat in contestant.samples]
    tokens = sum(len(text) for text in truth)
    middle = statistics.median_low(seconds)
    stats, all_tokens = contestant.runtime.stats, max(tokens * len(seconds), 1)
    return ExpertRow(
        method=contestant.name,
        expert_memory_bytes=contestant.runtime.memory_bytes if contestant.name == RESIDENT else budget,
        tokens=tokens,
        seconds=middle,
        tokens_per_second=tokens / middle,
        spread=(max(seconds) - min(seconds)) / middle,
        hit_rate=stats.hit_rate,
        prefetch_recall=stats.recall,
        prefetch_precision=stats.precision,
        late=stats.late,
        wasted=stats.wasted,
        bytes_per_token=stats.bytes / all_tokens,
        demand_bytes_per_token=stats.demand_bytes / all_tokens,
        stall_ms=1e3 * stats.stall_seconds / all_tokens,
        predictor_ms=1e3 * stats.predictor_seconds / all_tokens,
        identical=all([text for text, _ in repeat] == list(truth) for repeat in contestant.samples),
        seconds_per_repeat=seconds,
    )


def _speedups(rows: Sequence[ExpertRow]) -> None:
    base = next((row for row in rows if row.method == "on_demand" and row.identical), None)
    for row in rows:
        if base is not None and row.identical:
            row.speedup = row.tokens_per_second / base.tokens_per_second


def _last_token(events: Sequence[Event]) -> list[Event]:
    """The events of the last whole pass over the layers, in seconds from its beginning."""
    starts = [event.begin for event in events if event.kind == "token"]
    if len(starts) < 2:
        return []
    begin, end = starts[-2:]
    inside = [event for event in events if begin <= event.begin < end and event.kind != "token"]
    return [Event(e.kind, e.begin - begin, e.end - begin, e.row, e.expert) for e in inside]
