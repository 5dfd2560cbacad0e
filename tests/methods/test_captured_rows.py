"""What drafts compute beside the model's own layers, captured: the tape repeats tensor operations
only, as a CUDA graph does, and says what the same runner says on a decoder without captures.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime.tape_recorder import EagerRecorder, TapeRecorder
from torch.utils._python_dispatch import TorchDispatchMode

from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.methods._shared.layers import visible_slots
from multirate.methods._shared.teacher import Teacher
from multirate.methods.spec import find, find_training
from multirate.runtime.cuda.captured_rows import GraphedRows
from multirate.runtime.cuda.decoder import GraphedDecoder
from multirate.runtime.cuda.static_cache import seen_slots
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.rows import Rows

from .tiny import VOCAB, base, disturb, ids

METHODS = ["m2r2", "m2r2-carry", "kangaroo", "eagle", "eagle3"]
HEADS: dict[str, list[dict[str, Any]]] = {
    "medusa": [{}, {"draft_vocab": 40}],
    "hydra": [{}, {"layers": 1, "draft_vocab": 40}],
}
"""Methods whose heads read the last verified row, and the heads' options to be tested."""
DRAFT_ALL = {"draft_threshold": 0.01, "verify_threshold": 0.01}
SETTINGS = {method: {"depth": 3, **DRAFT_ALL} for method in METHODS} | {
    "medusa": {},
    "hydra": DRAFT_ALL,
}
CLOSE = {"atol": 2e-4, "rtol": 1e-4}
STOP = StopSettings(max_new_tokens=12)
MODEL = base()
_streams: dict[str, Any] = {}


def stream_of(method: str, **options: Any) -> Any:
    """An accelerator whose every weight matters."""
    key = repr((method, options))
    if key not in _streams:
        training, shape = find_training(method), Teacher(MODEL).shape
        torch.manual_seed(4)
        module = training.build(training.config_for(shape, **options), shape)
        disturb(module)
        _streams[key] = module.eval()
    return copy.deepcopy(_streams[key])


def drafter_of(method: str, decoder: HFDecoder, **given: Any) -> Any:
    return find(method).make_drafter(decoder, stream_of(method), given or None)


def heads_runners(method: str, options: dict[str, Any]) -> tuple[list[Any], TapeRecorder]:
    """Those of a decoder with captures, on the tape, and of one without."""
    tape = TapeRecorder()
    heads = [stream_of(method, **options) for _ in range(2)]
    decoders = GraphedDecoder(MODEL, tape), HFDecoder(MODEL)
    made = [find(method).make_drafter(d, h) for d, h in zip(decoders, heads, strict=True)]
    return [drafter.runner for drafter in made], tape  # type: ignore[union-attr]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(METHODS), st.data())
def test_random_steps_equal_those_without_captures(method: str, data: st.DataObject) -> None:
    """Waiting rows, chains and trees of drafts, over what earlier ones have left."""
    decoders = GraphedDecoder(MODEL, TapeRecorder()), HFDecoder(MODEL)
    runners = [drafter_of(method, decoder).runner for decoder in decoders]
    size, length = decoders[1].info.hidden_size, 0
    draw, asked = (
        torch.Generator().manual_seed(data.draw(st.integers(0, 99))),
        data.draw(st.booleans()),
    )
    caches = [decoder.new_cache(1, 64) for decoder in decoders]
    for runner, cache in zip(runners, caches, strict=True):
        runner.begin(cache)
    for _ in range(data.draw(st.integers(1, 4))):
        pending = data.draw(st.integers(0, 9))
        first = Rows.causal(0, length, pending + 1)
        parents = [data.draw(st.integers(0, i)) for i in range(data.draw(st.integers(0, 5)))]
        tree = Rows.draft_tree(0, length + pending, parents)
        levels = [(first, pending + 1, 1)]
        if parents:
            rest = [getattr(tree, f)[1:] for f in ("seq", "slot", "pos", "prefix", "tree")]
            levels.append((Rows(*rest), len(parents), len(parents)))
        for rows, count, fresh in levels:
            tokens = torch.randint(3, VOCAB, (count,), generator=draw).tolist()
            carried = torch.randn(count, size, generator=draw)
            said = []
            for runner in runners:
                if rows is first and pending and not runner.keys_only:
                    runner.slow(tokens[:-1], Rows.causal(0, length, pending))
                count = 3 if asked else 0
                hidden, p, best = runner.level(tokens, rows, carried, fresh, count, 2.0)
                assert (best is not None) == (asked and runner is runners[0])
                said.append((hidden, p, *(best or runner.top(p, 3, 2.0))))
            torch.testing.assert_close(said[0][0], said[1][0], **CLOSE)
            torch.testing.assert_close(said[0][1], said[1][1], **CLOSE)
            check_same_tokens(said[0][2], said[1][2], runners[1].logits(said[1][1]))
            np.testing.assert_allclose(said[0][3], said[1][3], rtol=1e-3, atol=1e-6)
        for cache in caches:
            cache.commit(0, pending + 1)
        length += pending + 1
    captured = runners[0]._captured
    assert captured is not None and captured.fallback is None and runners[1]._captured is None
    assert runners[0]._levels.fallback is None and runners[1]._levels is None
    for kept in ("keys", "values"):
        of_own = [
            None if r._own is None else getattr(r._own, kept)[0][:, :, :length] for r in runners
        ]
        if of_own[0] is not None:
            torch.testing.assert_close(*of_own, **CLOSE)


def check_same_tokens(ids: Any, wanted: Any, logits: torch.Tensor) -> None:
    """The same tokens; only ones whose logits [n, V] are equal but for rounding change places."""
    for row, other, own in zip(ids, wanted, logits, strict=True):
        assert len(set(row)) == len(row)
        torch.testing.assert_close(own[row], own[other], **CLOSE)


def check_same(found: list[tuple[list[list[int]], list[list[float]]]]) -> None:
    (ids, probs), (wanted, expected) = found
    assert ids == wanted
    np.testing.assert_allclose(probs, expected, rtol=1e-3, atol=1e-6)


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(HEADS["medusa"]), st.data())
def test_heads_of_one_row_equal_those_without_captures(
    options: dict[str, Any], data: st.DataObject
) -> None:
    runners, tape = heads_runners("medusa", options)
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    for count in data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)):
        hidden = torch.randn(data.draw(st.integers(1, 9)), MODEL.config.hidden_size, generator=draw)
        check_same([runner.best(hidden, count, 4) for runner in runners])
    assert tape.replayed and runners[0]._captured.fallback is None and runners[1]._captured is None


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(HEADS["hydra"]), st.data())
def test_heads_of_a_path_equal_those_without_captures(
    options: dict[str, Any], data: st.DataObject
) -> None:
    """The prefix layer reads what waits, over what it has read; each level has rows of its own."""
    runners, tape = heads_runners("hydra", options)
    size, length = MODEL.config.hidden_size, 0
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    own = [runner.new_cache(1, 64) for runner in runners]
    for _ in range(data.draw(st.integers(1, 4))):
        hidden = torch.randn(data.draw(st.integers(1, 9)), size, generator=draw)
        rows = Rows.causal(0, length, len(hidden))
        length += len(hidden)
        read = [
            runner.prefixed(hidden, rows, cache) for runner, cache in zip(runners, own, strict=True)
        ]
        torch.testing.assert_close(read[0], read[1], **CLOSE)
        known = [x[-1:] for x in read]
        for k in range(1, data.draw(st.integers(1, 4)) + 1):
            count = len(known[0])
            tokens = torch.randint(3, VOCAB, (count,), generator=draw).tolist()
            places = np.arange(length, length + count, dtype=np.int32)
            said = [
                runner.best(k, z, tokens, places, 4)
                for runner, z in zip(runners, known, strict=True)
            ]
            torch.testing.assert_close(said[0][0], said[1][0], **CLOSE)
            check_same([best for _, best in said])
            parents = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=5))
            known = [z[parents] for z, _ in said]
    assert tape.replayed and runners[0]._captured.fallback is None and runners[1]._captured is None


@pytest.mark.parametrize("method", SETTINGS)
def test_generations_are_the_base_s_and_share_captures(method: str) -> None:
    tape = TapeRecorder()
    graphed, plain = GraphedDecoder(MODEL, EagerRecorder()), HFDecoder(MODEL)
    drafter, other = (
        drafter_of(method, decoder, **SETTINGS[method]) for decoder in (graphed, plain)
    )
    graphed.recorder = tape

    def rounds() -> list[Any]:
        found = []
        for seed, length in enumerate((5, 30, 11)):
            prompts = [ids(1, length, seed)[0].tolist()]
            base_s = generate(plain, PlainStep(), prompts, stop=STOP).sequences
            with_tape = generate(graphed, SpeculativeStep(drafter), prompts, stop=STOP)
            without = generate(plain, SpeculativeStep(other), prompts, stop=STOP)
            assert with_tape.sequences == without.sequences == base_s
            counts = [(out.stats.drafted, out.stats.accepted) for out in (with_tape, without)]
            assert counts[0] == counts[1]
            found.append(counts[0])
        return found

    first = rounds()
    assert sum(drafted for drafted, _ in first) and tape.captured and tape.replayed
    captured = tape.captured
    rounds()  # drafts that continue the text learn from the first rounds, so they may differ
    assert tape.captured == captured
    levels = getattr(drafter.runner, "_levels", None)
    assert drafter.runner._captured.fallback is None and (levels is None or not levels.fallback)


class _Launches(TorchDispatchMode):
    """Counts what a GPU would be asked for: operations but views of memory that is there."""

    count = 0
    paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = func.is_view or func.overloadpacket is torch.ops.aten._unsafe_view
        self.count += not self.paused and not view
        return func(*args, **(kwargs or {}))


class _OneLaunch(EagerRecorder):
    """A replay counts as one."""

    def __init__(self, launches: _Launches) -> None:
        self.launches = launches

    def capture(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def replay() -> torch.Tensor:
            self.launches.paused = True
            out = function()
            self.launches.paused = False
            self.launches.count += 1
            return out

        return replay


def level_of(method: str, runner: Any, decoder: HFDecoder) -> Callable[[], object]:
    """A level of one row; of heads that do not know one another's tokens, all three. prefix: of the
    layer that reads verified tokens before the first level.
    """
    x, rows = torch.randn(2, 1, MODEL.config.hidden_size), Rows.causal(0, 0, 1)
    if method == "medusa":
        return lambda: runner.best(x[0], 3, 3)
    if method == "hydra":
        return lambda: runner.best(1, x[0], [5], np.zeros(1, np.int32), 3)
    if method == "hydra, prefix":
        return partial(runner.prefixed, x[0], rows, runner.new_cache(1, 64))
    runner.begin(decoder.new_cache(1, 64))

    def level() -> object:
        _, p, best = runner.level([5], rows, x[1], 1, 3)
        return best or runner.top(p, 3)

    return level


@pytest.mark.parametrize(
    ("method", "most"),
    [
        ("m2r2-carry", 5),
        ("kangaroo", 5),
        ("eagle", 5),
        ("eagle3", 5),
        ("medusa", 5),
        ("hydra", 7),
        ("hydra, prefix", 4),
    ],
)
def test_a_level_is_few_launches(method: str, most: int) -> None:
    """Of a stream one capture, and the copies around it; of heads less than half of those without
    captures beside the model's own.
    """
    counts = []
    for captured in (False, True):
        launches = _Launches()
        decoder = GraphedDecoder(MODEL, _OneLaunch(launches))
        runner = drafter_of(method.split(",")[0], decoder).runner
        if not captured:
            runner._captured = runner._levels = None
        level = level_of(method, runner, decoder)
        with torch.no_grad():
            level()  # captures
            launches.count = 0
            with launches:
                level()
        counts.append(launches.count)
    assert counts[1] <= most < counts[0] / 2


@pytest.mark.parametrize("method", ["m2r2-carry", *HEADS])
def test_sequences_side_by_side_run_without_captures_of_their_own_layer(method: str) -> None:
    graphed, plain = GraphedDecoder(MODEL, TapeRecorder()), HFDecoder(MODEL)
    prompts = [[3, 4, 5], [9], [8, 7]]
    out = generate(graphed, SpeculativeStep(drafter_of(method, graphed)), prompts, stop=STOP)
    assert out.sequences == generate(plain, PlainStep(), prompts, stop=STOP).sequences


class _Wrong(EagerRecorder):
    def capture(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return lambda: function() * 1.1


def test_a_function_that_reads_the_device_falls_back_and_says_so() -> None:
    graphed = GraphedDecoder(MODEL, TapeRecorder())
    rows = GraphedRows(graphed)
    x = torch.randn(3, 4)
    with pytest.warns(UserWarning, match="kernel by kernel.*not permitted when stream"):
        out = rows.alone("reads", lambda x: x * float(x.sum()), x)
    assert torch.equal(out, x * float(x.sum())) and rows.fallback is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(rows.alone("other", torch.neg, x), -x)


def test_a_capture_that_gives_other_numbers_is_not_used() -> None:
    graphed = GraphedDecoder(MODEL, EagerRecorder())
    graphed.recorder = _Wrong()
    rows, x = GraphedRows(graphed), torch.randn(3, 4)
    with pytest.warns(UserWarning, match="other numbers .relative difference 1.0e-01"):
        assert torch.equal(rows.alone("negated", torch.neg, x), -x)
    assert torch.equal(rows.alone("negated", torch.neg, x), -x)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2**62)), min_size=1, max_size=4))
def test_slots_seen_on_the_device_are_those_of_the_rows(numbers: list[tuple[int, int]]) -> None:
    prefix, tree = (np.array(column, np.int64) for column in zip(*numbers, strict=True))
    expected = visible_slots(prefix.astype(np.int32), tree, 128)
    assert np.array_equal(seen_slots(*map(torch.from_numpy, (prefix, tree)), 128), expected)
