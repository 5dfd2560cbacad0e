"""The server's metrics, under the names that dashboards for vLLM know."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from multirate.serving.requests import Counters, Scheduler

_LABEL = "model_name"
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
GAUGES = {
    "vllm:num_requests_running": ("running", "Requests that are being decoded now."),
    "vllm:num_requests_waiting": ("waiting", "Requests that wait for a place now."),
    "multirate:waiting_tokens": ("waiting_tokens", "Prompt tokens of the waiting requests."),
    "multirate:kept_prefix_bytes": ("kept_bytes", "Bytes of K/V kept for prompts to come."),
}
COUNTERS = {
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens, including those found in the cache."),
    "vllm:generation_tokens": ("new_tokens", "Emitted tokens."),
    "vllm:prefix_cache_queries": ("prompt_tokens", "Prompt tokens that were looked up."),
    "vllm:prefix_cache_hits": (
        "cached_tokens",
        "Prompt tokens that did not have to be read again. Hit rate: hits / queries.",
    ),
    "vllm:spec_decode_num_drafts": ("drafts", "Drafts that were verified."),
    "vllm:spec_decode_num_draft_tokens": ("drafted", "Drafted tokens that were verified."),
    "vllm:spec_decode_num_accepted_tokens": (
        "accepted",
        "Drafted tokens that were emitted. Acceptance rate: this / num_draft_tokens. Mean accepted "
        "length: 1 + this / num_drafts.",
    ),
    "multirate:decode_steps": (
        "steps",
        "Steps of requests: a pass of three requests counts three. Tokens per step: "
        "generation_tokens / this.",
    ),
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


class Metrics:
    """Counts of one server. The first three are measured here, the others are the scheduler's."""

    def __init__(self, scheduler: Scheduler, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_OfScheduler(scheduler, model))
        ProcessCollector(registry=self.registry)
        self._first = self._histogram(
            "vllm:time_to_first_token_seconds",
            "From the arrival of a request's body to its first token.",
        ).labels(model)
        self._next = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Time since the step before, divided by this step's tokens; once for each token.",
        ).labels(model)
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds",
            "From the arrival of a request's body to its answer's last token.",
        ).labels(model)
        self._model = model
        self._ended = Counter(
            "vllm:request_success",
            "Answers that ended, by finished_reason: stop, length, tool_calls, abort (the client "
            "left) or error.",
            (_LABEL, "finished_reason"),
            registry=self.registry,
        )

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """`count` tokens of one message, `seconds` each."""
        for _ in range(count):
            self._next.observe(seconds)

    def finished(self, reason: str, seconds: float) -> None:
        """An answer ended. `seconds` since its request arrived."""
        self._ended.labels(self._model, reason).inc()
        if reason not in ("abort", "error"):
            self._whole.observe(seconds)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, (_LABEL,), registry=self.registry, buckets=_SECONDS)


class _OfScheduler(Collector):
    """The scheduler's counters, read when somebody asks."""

    def __init__(self, scheduler: Scheduler, model: str) -> None:
        self._scheduler = scheduler
        self._model = model

    def collect(self) -> Iterator[Metric]:
        return _families(self._scheduler.counters(), self._model)

    def describe(self) -> Iterator[Metric]:
        return _families(Counters(), self._model)


def _families(counted: Counters, model: str) -> Iterator[Metric]:
    for name, (field, text) in GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=[_LABEL])
        gauge.add_metric([model], getattr(counted, field))
        yield gauge
    for name, (field, text) in COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=[_LABEL])
        counter.add_metric([model], getattr(counted, field))
        yield counter
    places = CounterMetricFamily(
        PER_POSITION,
        "Drafted tokens that were emitted, by their place in the draft, from 0. Acceptance at a "
        "place: this / num_drafts.",
        labels=[_LABEL, "position"],
    )
    for place, count in enumerate(counted.accepted_at):
        places.add_metric([model, str(place)], count)
    yield places
