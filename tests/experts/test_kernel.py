"""Passes by the kernel: the same text, and the same loads, as the state machine in Python; faults,
Ctrl-C, changes.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from typing import Any

import pytest
import torch

from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.experts.controller import AdaptivePredictor
from multirate.experts.kernel import plan_of, plans_of
from multirate.experts.policies import Belady, eviction_policy
from multirate.experts.predictors import NextLayerGate, Oracle, Popularity, PreviousToken
from multirate.experts.runtime import ExpertRuntime, ExpertSettings
from multirate.experts.stats import ExpertStats
from multirate.experts.store import ExpertStore
from multirate.methods._shared.shape import BaseShape
from multirate.methods._shared.teacher import Teacher
from multirate.methods.m2r2_experts.config import ExpertPredictorConfig
from multirate.methods.m2r2_experts.modules import ExpertPredictor
from multirate.methods.m2r2_experts.start import start_from_experts
from multirate.runtime.rows import Rows

from .tiny import Shuffled

STOP = StopSettings(max_new_tokens=24)
IDS = torch.randint(2, 61, (60,), generator=torch.Generator().manual_seed(2))


def answers(mixture: Any, runtime: ExpertRuntime, prompts: list[list[int]]) -> list[list[int]]:
    _, offload, decoder = mixture
    offload.runtime = runtime
    return generate(decoder, PlainStep(), prompts, stop=STOP).sequences


def follow(mixture: Any, runtime: ExpertRuntime, count: int = len(IDS)) -> torch.Tensor:
    """Logits of tokens given one by one: a tiny model's own text repeats itself."""
    _, offload, decoder = mixture
    offload.runtime = runtime
    cache, found = decoder.new_cache(1, len(IDS)), []
    for at in range(count):
        rows = Rows.causal(0, at, 1)
        x = decoder.embed(IDS[at : at + 1], rows.pos)
        found.append(decoder.logits(decoder.layers(x, rows, 0, 4, cache)))
    return torch.cat(found)


def runtime_of(
    mixture: Any, slots: int | None, predictor: Any = "none", **settings: Any
) -> ExpertRuntime:
    offload, eviction = mixture[1], settings.pop("eviction", "lrfu")
    record = offload.store.index.record.bytes
    chosen = ExpertSettings(None if slots is None else slots * record, **settings)
    policy = eviction if not isinstance(eviction, str) else eviction_policy(eviction)
    return ExpertRuntime(offload.store, chosen, offload.predictor(predictor), policy)


@functools.lru_cache(maxsize=1)
def of_resident_experts(mixture: Any) -> torch.Tensor:
    """The logits with all experts in memory."""
    with runtime_of(mixture, None, kernel=False) as resident:
        return follow(mixture, resident)


def counts(
    mixture: Any, slots: int | None, kernel: bool, predictor: str = "none", **more: Any
) -> ExpertStats:
    with runtime_of(mixture, slots, predictor, kernel=kernel, **more) as runtime:
        assert torch.equal(follow(mixture, runtime), of_resident_experts(mixture))
        assert runtime.in_kernel == kernel
        return runtime.stats.copy()


def trace_of(mixture: Any) -> list[tuple[int, list[int]]]:
    with runtime_of(mixture, None) as runtime:
        runtime.trace = []
        follow(mixture, runtime)
        return runtime.trace


@pytest.mark.parametrize("slots", [4, 7, 11, None])
@pytest.mark.parametrize("eviction", ["none", "lru", "lrfu", "least_stale"])
def test_the_same_experts_stay_and_leave(mixture: Any, slots: int | None, eviction: str) -> None:
    """With nothing predicted, what is there does not depend on how fast reads are: every count is
    equal. One thread reads, as several end in any order, and the order decides what leaves first.
    """
    kernel, python = (
        counts(mixture, slots, one, eviction=eviction, threads=1) for one in (True, False)
    )
    for name in (
        "calls",
        "uses",
        "hits",
        "timely",
        "late",
        "wasted",
        "issued",
        "demand_bytes",
        "speculative_bytes",
    ):
        assert getattr(kernel, name) == getattr(python, name), name
    assert (
        kernel.hits > 0 or eviction == "none" or (slots or 99) < 9
    )  # fewer than a pass needs: lru keeps none in time


@pytest.mark.parametrize("eviction", ["none", "lrfu", "least_stale"])
@pytest.mark.parametrize(
    "predictor", ["previous_token", "popularity", "next_layer_gate", "accelerated"]
)
def test_the_same_experts_are_named(mixture: Any, predictor: str, eviction: str) -> None:
    """What was named ahead of time among what was missing, timely or not, is nearly the same: reads
    differ in speed. In little memory, so that there are enough of them to compare shares.
    """
    kernel, python = (
        counts(mixture, 5, one, predictor, eviction=eviction, prefetch_threshold=0.0, depth=1)
        for one in (True, False)
    )
    assert kernel.uses == python.uses
    if predictor == "popularity":
        return  # few reads, and of experts used equally often each takes its own
    assert kernel.issued - kernel.cancelled > 40
    assert kernel.recall == pytest.approx(python.recall, abs=0.1)
    assert kernel.precision == pytest.approx(python.precision, abs=0.1)


def test_an_oracle_is_never_wrong(mixture: Any) -> None:
    trace = trace_of(mixture)
    for depth in (1, 2, 3):
        with runtime_of(mixture, 12, depth=depth, prefetch_threshold=0.0) as runtime:
            runtime.predict_with(Oracle(trace))
            follow(mixture, runtime)
            stats = runtime.stats
            assert runtime.in_kernel
            assert stats.issued - stats.cancelled >= stats.timely + stats.late > 0
            assert stats.precision > 0.9 and stats.recall > 0.5


def whole_experts(mixture: Any, depth: int) -> ExpertPredictor:
    """A predictor whose pruned experts are the experts themselves: the stream that it runs ahead is
    the true one.
    """
    original = mixture[0]
    shape = BaseShape.of(original.config)
    neurons = (
        getattr(original.config, "moe_intermediate_size", None) or original.config.intermediate_size
    )
    config = ExpertPredictorConfig.for_base(shape, ahead=depth, attention=True, sketch=neurons)
    made = ExpertPredictor(config, shape)
    tokens = IDS.view(4, 15)
    teacher = Teacher(original.bfloat16())
    start_from_experts(teacher, made, [(tokens, torch.ones_like(tokens, dtype=torch.bool), None)])
    return made.requires_grad_(False)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_stream_that_runs_ahead_is_the_models_own(mixture: Any, depth: int) -> None:
    """With whole experts as pruned ones nearly all that is predicted is needed, at any depth,
    across a dense layer too; and what is left in the caches of layers that have not run changes
    nothing.
    """
    offload = mixture[1]
    before, offload.trained_predictor = offload.trained_predictor, whole_experts(mixture, depth)
    try:
        stats = counts(mixture, 12, True, "accelerated", prefetch_threshold=0.0, depth=depth)
        assert stats.issued > 15 and stats.precision > 0.9 and stats.recall > 0.5
        batch = [[5, 9, 2, 44, 17, 30, 8], [3, 4, 50], [7]]
        with (
            runtime_of(mixture, None) as resident,
            runtime_of(mixture, 9, "accelerated", depth=depth) as runtime,
        ):
            right = answers(mixture, resident, batch)
            assert answers(mixture, runtime, batch) == right
        for other in (
            {"kernel": False},
            {"direct": False},
        ):  # Python leads the pass: the same residual, the same text
            with runtime_of(
                mixture, 12, "accelerated", prefetch_threshold=0.0, depth=depth, **other
            ) as python:
                follow(mixture, python)
                assert not python.in_kernel
                assert python.stats.precision > 0.9 and python.stats.recall > 0.5
                assert answers(mixture, python, batch) == right
    finally:
        offload.trained_predictor = before


def test_a_stream_that_nobody_can_run_is_refused(mixture: Any) -> None:
    offload = mixture[1]
    before, native, offload.trained_predictor = (
        offload.trained_predictor,
        offload.native,
        whole_experts(mixture, 1),
    )
    offload.native = None
    try:
        with pytest.raises(UserError, match="attention=false"):
            offload.predictor("accelerated")
        with pytest.raises(UserError, match="expert policy accelerated"):
            offload.use_policy("accelerated")
        assert [type(one) for one in offload.policy_predictor("aot").candidates] == [NextLayerGate]
    finally:
        offload.trained_predictor, offload.native = before, native


def test_layers_that_cannot_run_ahead_refuse_it_by_name(mixture: Any) -> None:
    """transformers' own layers: the policy accelerated is an error, and aot says that the gate
    predicts.
    """
    offload = mixture[1]
    before, offload.trained_predictor = offload.trained_predictor, whole_experts(mixture, 1)
    budget = 9 * offload.store.index.record.bytes
    try:
        offload.use_policy("accelerated", budget)
        with (
            pytest.raises(UserError, match=r"expert policy accelerated.*aot or next_layer_gate"),
            torch.no_grad(),
        ):
            offload.model(IDS[None, :4])
        chooser = offload.use_policy("aot", budget).predictor
        assert isinstance(chooser, AdaptivePredictor)
        chooser.candidate = 1
        with (
            pytest.warns(UserWarning, match="uses next_layer_gate to predict experts"),
            torch.no_grad(),
        ):
            offload.model(IDS[None, :4])
    finally:
        offload.trained_predictor = before
        offload.use()


def test_beladys_cache_hits_most(mixture: Any) -> None:
    keys = [(row, expert) for row, experts in trace_of(mixture) for expert in experts]
    hits = {
        name: counts(mixture, 7, True, eviction=name).hits
        for name in ("lru", "lrfu", "least_stale")
    }
    best = counts(mixture, 7, True, eviction=Belady(keys)).hits
    assert best == counts(mixture, 7, False, eviction=Belady(keys)).hits
    assert best >= max(hits.values())


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_threads_or_the_system_may_read(mixture: Any, threads: int) -> None:
    """And a batch, whose rows need the union of their experts, more than there are slots."""
    prompts = [[5, 9, 2, 44, 17, 30, 8], [3, 4, 50], [7]]
    with (
        runtime_of(mixture, None) as resident,
        runtime_of(mixture, 4, "next_layer_gate", threads=threads) as runtime,
    ):
        for slot in runtime.memory.slots:
            slot.fill_(0xFF)  # NaN: an unread slot would be seen
        assert answers(mixture, runtime, prompts) == answers(mixture, resident, prompts)


def test_a_disk_that_goes_away_and_comes_back(mixture: Any) -> None:
    with runtime_of(mixture, 4, eviction="none", direct=True) as runtime:
        right = follow(mixture, runtime)
        file = runtime.memory.reader.fileno  # type: ignore[attr-defined]
        kept, nothing = os.dup(file), os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, file)
        with pytest.raises(
            UserError,
            match=r"expert \d of layer \d could not be read from .*truncated while in use",
        ):
            follow(mixture, runtime)
        assert runtime.stats.errors > 0
        os.dup2(kept, file)
        os.close(kept)
        os.close(nothing)
        assert torch.equal(follow(mixture, runtime), right)


@pytest.mark.parametrize("kernel", [True, False])
def test_damage_after_the_store_was_sealed(mixture: Any, kernel: bool) -> None:
    """Bytes that change after the store was opened: an error where an expert is first read, whoever
    reads it.
    """
    offload = mixture[1]
    store = ExpertStore.open(offload.store.folder)
    place = store.offset(len(store.index.layers) - 1, 0)
    size = store.index.num_experts * store.index.record.bytes
    whole = store.path.read_bytes()
    offload.store, before = store, offload.store
    try:
        with store.path.open("r+b") as file:
            file.seek(place)
            file.write(bytes(byte ^ 4 for byte in whole[place : place + size]))
            os.fsync(file.fileno())
        for predictor in ("none", "next_layer_gate"):
            with (
                runtime_of(mixture, 9, predictor, kernel=kernel) as runtime,
                pytest.raises(
                    UserError,
                    match=r"expert \d of layer 3 could not be read .*its checksum differs",
                ),
            ):
                follow(mixture, runtime)
            assert runtime.stats.errors > 0
    finally:
        store.path.write_bytes(whole)
        offload.store = before


def test_ctrl_c_while_a_read_takes_for_ever(mixture: Any) -> None:
    with runtime_of(mixture, 4, eviction="none", disk_bytes_per_second=2000.0) as runtime:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                follow(mixture, runtime)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert runtime.in_kernel
    assert time.monotonic() - began < 3


def test_a_pass_after_one_that_was_given_up(mixture: Any) -> None:
    """Each read takes longer than a pass waits before it looks for Ctrl-C: passes pause and go on,
    and the first of the next generation is not taken for the rest of the one that was interrupted.
    """
    record = mixture[1].store.index.record.bytes
    with (
        runtime_of(mixture, None) as resident,
        runtime_of(mixture, None, disk_bytes_per_second=record / 0.13) as slow,
    ):
        right = follow(mixture, resident, 1)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.11)
            with pytest.raises(KeyboardInterrupt):
                follow(mixture, slow, 1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        other = IDS[:1].clone()
        IDS[:1] = 60 - other  # another token, other experts
        try:
            assert torch.equal(follow(mixture, slow, 1), follow(mixture, resident, 1))
        finally:
            IDS[:1] = other
        assert torch.equal(follow(mixture, slow, 1), right)


def test_python_goes_on_where_the_kernel_cannot(mixture: Any) -> None:
    """A predictor that it does not know, a trace that is wanted: the same text, and counts that go
    on.
    """
    offload = mixture[1]
    with runtime_of(mixture, 9, "next_layer_gate") as runtime:
        right = follow(mixture, runtime)
        assert runtime.in_kernel
        uses = runtime.stats.uses
        runtime.predict_with(PreviousToken(len(offload.store.index.layers)))
        assert runtime.in_kernel
        runtime.predict_with(
            Shuffled(
                PreviousToken(len(offload.store.index.layers)), offload.store.index.num_experts
            )
        )
        assert not runtime.in_kernel
        assert torch.equal(follow(mixture, runtime), right)
        assert runtime.stats.uses == 2 * uses
    with runtime_of(mixture, 9) as runtime:
        follow(mixture, runtime)
        runtime.trace = []
        assert (
            torch.equal(follow(mixture, runtime), right) and runtime.trace and not runtime.in_kernel
        )


def test_several_predictors_take_turns(mixture: Any) -> None:
    """One after the other in one runtime: the same text, and each names what it names, not what
    another would.
    """
    index = mixture[1].store.index
    with runtime_of(mixture, None) as resident:
        right = follow(mixture, resident)
    rows = len(index.layers)
    candidates = {"last": PreviousToken(rows), "all": Popularity(rows, index.num_experts)}
    chooser = AdaptivePredictor(candidates, stay=10**9)
    with runtime_of(mixture, 9, chooser, prefetch_threshold=0.0, depth=1) as runtime:
        chooser._left = 10**9
        issued = []
        for chooser.candidate in (
            1,
            0,
            1,
            0,
            1,
        ):  # popularity learns in the first, and does not forget
            runtime.reset()
            assert torch.equal(follow(mixture, runtime), right)
            assert runtime.in_kernel
            issued.append(runtime.stats.issued)
        assert min(issued[2::2]) > 1.3 * max(issued[1::2]) > 0
        chooser.on = False
        runtime.reset()
        assert torch.equal(follow(mixture, runtime), right) and runtime.stats.issued == 0


def test_preloading_and_counting_from_zero(mixture: Any) -> None:
    with runtime_of(mixture, None) as runtime:
        follow(mixture, runtime)
        runtime.preload()
        runtime.reset(events=True)
        follow(mixture, runtime)
        stats = runtime.stats
        assert stats.hits == stats.uses and not stats.bytes
        assert stats.events and {event.kind for event in stats.events} == {"token", "compute"}
        assert all(event.begin <= event.end for event in stats.events)
        runtime.reset()
        assert runtime.stats == ExpertStats()
    with runtime_of(mixture, None) as early:
        early.preload()
        early.reset()
        follow(mixture, early)
        assert early.in_kernel and early.stats.hits == early.stats.uses


def test_what_the_kernel_knows() -> None:
    class Mine(PreviousToken):
        """Not the one that the kernel has."""

    assert plan_of(None, 0.5) is not None and plan_of(Popularity(3, 2), 0.5) is not None
    assert plan_of(Mine(3), 0.5) is None
    several = plans_of(AdaptivePredictor({"a": PreviousToken(3), "b": Popularity(3, 2)}), 0.5)
    assert (
        several is not None
        and [one.plan.kind for one in several] == [1, 2]
        and several[0].plan.most_depth == 2
    )
    assert plans_of(AdaptivePredictor({"a": PreviousToken(3), "b": Mine(3)}), 0.5) is None
