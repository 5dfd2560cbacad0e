"""All expert policies on the same tokens: runs interleaved, every token compared, each
budget in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from multirate.decoding.logits import SamplingSettings
from multirate.engine import PLAIN, Engine
from multirate.experts.expert_cache import Key
from multirate.experts.model import OffloadedExperts
from multirate.experts.named_policies import AHEAD_OF_TIME, FIXED_POLICIES, policy_named
from multirate.experts.policies import Belady, EvictionPolicy, eviction_policy
from multirate.experts.predictors import Oracle
from multirate.experts.runtime import ExpertRuntime, ExpertSettings
from multirate.experts.stats import Event, ExpertStats
from multirate.lab.bench.prompts import Prompt

Trace = list[tuple[int, list[int]]]
RESIDENT = "resident"
BOUNDS = ("oracle", "belady", RESIDENT)
ALL_POLICIES = (*FIXED_POLICIES, AHEAD_OF_TIME, *BOUNDS)


@dataclass
class ExpertRow:
    """One policy at one budget.

    tokens, seconds, tokens_per_second: total tokens over total time of the median repeat, from the
    first token of each answer to its last. first_token_ms: mean time until the first token; a long
    prompt needs every expert, whatever the policy. total_tokens_per_second: with that time.
    spread: of the seconds.

    The other fields cover decoding as well. hit_rate: share of needed experts found in the cache.
    prefetch_recall: share of the others that were prefetched. prefetch_precision: share of the
    prefetched experts that were needed. late: needed while the read was queued or running.
    wasted: evicted unused. bytes_per_token, stall_ms, predictor_ms: per token.
    speedup, total_speedup: compared with on_demand. depth: how many layers ahead experts were
    predicted at the end.
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
    first_token_ms: float
    total_tokens_per_second: float
    depth: int | None = None
    speedup: float | None = None
    total_speedup: float | None = None
    seconds_per_repeat: list[float] = field(default_factory=list)


@dataclass
class ExpertRun:
    """Each budget with its rows, and the timeline of one token for each policy (of the first budget
    measured).
    """

    budgets: list[tuple[int, list[ExpertRow]]]
    timelines: dict[str, list[Event]]
    interrupted: bool = False

    @property
    def rows(self) -> list[ExpertRow]:
        return [row for _, rows in self.budgets for row in rows]


@dataclass
class _Answer:
    """One answer: its tokens, and the seconds to the first of them and from there to the last."""

    tokens: list[int]
    first: float
    rest: float


class _Run:
    """A policy with a runtime of its own, whose cache lives through the whole run. decoding: counts
    of all decoding.
    """

    def __init__(
        self,
        offload: OffloadedExperts,
        name: str,
        settings: ExpertSettings,
        traces: Sequence[Trace],
        order: Sequence[int],
    ) -> None:
        self.name, self._traces = name, traces
        self.samples: list[list[_Answer]] = []
        self.decoding = ExpertStats()
        eviction: EvictionPolicy | None = None
        if name == "belady":
            keys: list[Key] = [
                (row, e) for index in order for row, experts in traces[index] for e in experts
            ]
            eviction = Belady(keys)
        else:
            eviction = eviction_policy("lrfu" if name in BOUNDS else policy_named(name).eviction)
        if name == RESIDENT:
            settings = ExpertSettings(None, direct=settings.direct)
        predictor = None if name in BOUNDS else offload.policy_predictor(name)
        self.runtime = ExpertRuntime(offload.store, settings, predictor, eviction)

    def ready(self, index: int) -> None:
        """Before prompt `index`: the oracle is given its trace."""
        if self.name == "oracle":
            self.runtime.predict_with(Oracle(self._traces[index]))

    def warm_up(self, answer: _Answers, prompt: Prompt) -> None:
        """Answers the first prompt, which is not counted."""
        if self.name == RESIDENT:
            self.runtime.preload()
        self.ready(0)
        answer(self.runtime, prompt)
        self.runtime.reset()

    def timeline(self, answer: _Answers, prompt: Prompt) -> list[Event]:
        """The events of one token of the first prompt's answer."""
        self.ready(0)
        self.runtime.reset(events=True)
        answer(self.runtime, prompt)
        return _last_token(self.runtime.stats.events or [])


class _Answers:
    def __init__(self, engine: Engine, max_new_tokens: int) -> None:
        self._engine, self._stop = engine, engine.stopping(max_new_tokens, ())

    def __call__(
        self, runtime: ExpertRuntime, prompt: Prompt, decoding: ExpertStats | None = None
    ) -> _Answer:
        """Adds the counts of decoding to `decoding`."""
        engine = self._engine
        assert engine.experts is not None
        engine.experts.runtime = runtime
        engine.forget()
        first: list[tuple[float, ExpertStats]] = []

        def on_tokens(_: int, __: Sequence[int]) -> None:
            if not first:
                first.append((time.perf_counter(), runtime.stats.copy()))

        began = time.perf_counter()
        output = engine.generate([prompt.tokens], SamplingSettings(), self._stop, PLAIN, on_tokens)
        end = time.perf_counter()
        at, before = first[0] if first else (end, runtime.stats.copy())
        if decoding is not None:
            decoding.add(runtime.stats.minus(before))
        return _Answer(output.sequences[0], at - began, end - at)

    def without_limit(
        self, offload: OffloadedExperts, prompts: Sequence[Prompt]
    ) -> tuple[list[list[int]], list[Trace]]:
        """The true tokens and needs of each prompt, from a runtime that holds all experts."""
        truth, traces = [], []
        with ExpertRuntime(offload.store) as resident:
            for prompt in prompts:
                resident.trace = []
                truth.append(self(resident, prompt).tokens)
                traces.append(resident.trace)
        return truth, traces


def measure_policies(
    engine: Engine,
    prompts: Sequence[Prompt],
    names: Sequence[str],
    budgets: Sequence[int],
    settings: Callable[[int], ExpertSettings],
    *,
    max_new_tokens: int,
    repeats: int,
    on_answer: Callable[[], None] = lambda: None,
) -> ExpertRun:
    """Every policy on every prompt at every budget. settings(budget): how a runtime of that budget
    reads.

    The true tokens and needs are recorded with all experts resident first. One prompt warms each
    policy up. Ctrl-C ends the run with the budgets that are complete.
    """
    offload = engine.experts
    assert offload is not None
    answer, result, first = _Answers(engine, max_new_tokens), ExpertRun([], {}), offload.runtime
    truth, traces = answer.without_limit(offload, prompts)
    order = [0, *(index for _ in range(repeats) for index in range(len(prompts)))]
    try:
        for budget in budgets:
            runs = [_Run(offload, name, settings(budget), traces, order) for name in names]
            try:
                for run in runs:
                    run.warm_up(answer, prompts[0])
                for repeat in range(repeats):
                    for run in runs:
                        run.samples.append([])
                    for index, prompt in enumerate(prompts):
                        turn = (repeat + index) % len(runs)
                        for run in [*runs[turn:], *runs[:turn]]:
                            run.ready(index)
                            run.samples[-1].append(answer(run.runtime, prompt, run.decoding))
                            on_answer()
                rows = [_row(run, budget, truth) for run in runs]
                _speedups(rows)
                result.budgets.append((budget, rows))
                if not result.timelines:
                    result.timelines = {run.name: run.timeline(answer, prompts[0]) for run in runs}
            finally:
                for run in runs:
                    run.runtime.close()
    except KeyboardInterrupt:
        result.interrupted = True
    finally:
        offload.runtime = first
    return result


def _row(run: _Run, budget: int, truth: Sequence[list[int]]) -> ExpertRow:
    repeats = run.samples
    seconds = [sum(answer.rest for answer in repeat) for repeat in repeats]
    whole = statistics.median_low(
        [sum(answer.first + answer.rest for answer in repeat) for repeat in repeats]
    )
    tokens = sum(max(len(text) - 1, 0) for text in truth)  # the first of an answer is the prompt's
    middle = statistics.median_low(seconds)
    stats, all_tokens = run.decoding, max(tokens * len(seconds), 1)
    firsts = [answer.first for repeat in repeats for answer in repeat]
    predictor = run.runtime.predictor
    return ExpertRow(
        method=run.name,
        expert_memory_bytes=run.runtime.memory_bytes if run.name == RESIDENT else budget,
        tokens=tokens,
        seconds=middle,
        tokens_per_second=tokens / middle if middle else 0.0,
        spread=(max(seconds) - min(seconds)) / middle if middle else 0.0,
        hit_rate=stats.hit_rate,
        prefetch_recall=stats.recall,
        prefetch_precision=stats.precision,
        late=stats.late,
        wasted=stats.wasted,
        bytes_per_token=stats.bytes / all_tokens,
        demand_bytes_per_token=stats.demand_bytes / all_tokens,
        stall_ms=1e3 * stats.stall_seconds / all_tokens,
        predictor_ms=1e3 * stats.predictor_seconds / all_tokens,
        identical=all([answer.tokens for answer in repeat] == list(truth) for repeat in repeats),
        first_token_ms=1e3 * statistics.fmean(firsts),
        total_tokens_per_second=sum(map(len, truth)) / whole,
        depth=None if predictor is None else predictor.depth,
        seconds_per_repeat=seconds,
    )


def _speedups(rows: Sequence[ExpertRow]) -> None:
    base = next((row for row in rows if row.method == "on_demand" and row.identical), None)
    for row in rows:
        if base is not None and row.identical:
            row.speedup = (
                row.tokens_per_second / base.tokens_per_second if base.tokens_per_second else None
            )
            row.total_speedup = row.total_tokens_per_second / base.total_tokens_per_second


def _last_token(events: Sequence[Event]) -> list[Event]:
    """The events of the last whole pass over the layers, in seconds from its beginning."""
    starts = [event.begin for event in events if event.kind == "token"]
    if len(starts) < 2:
        return []
    begin, end = starts[-2:]
    inside = [event for event in events if begin <= event.begin < end and event.kind != "token"]
    return [Event(e.kind, e.begin - begin, e.end - begin, e.row, e.expert) for e in inside]
