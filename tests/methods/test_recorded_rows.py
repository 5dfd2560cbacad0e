"""What drafts compute beside the model's own layers, recorded: the tape repeats tensor operations
only, as a CUDA graph does, and says what the same runner says on a decoder without recordings.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model.tape_recorder import TapeRecorder

from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.speculative import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.methods.common.layers import visible_slots
from multirate.methods.common.teacher import Teacher
from multirate.methods.spec import find, find_training
from multirate.model.cuda.decoder import EagerRecorder, GraphedDecoder
from multirate.model.cuda.recorded_rows import RecordedRows
from multirate.model.cuda.static_cache import seen_slots
from multirate.model.hf.decoder import HFDecoder
from multirate.model.rows import Rows

from .tiny import VOCAB, base, disturb, ids

METHODS = ["m2r2", "m2r2-carry", "kangaroo", "eagle", "eagle3"]
CLOSE = {"atol": 2e-4, "rtol": 1e-4}
STOP = StopSettings(max_new_tokens=12)
MODEL = base()
_streams: dict[str, Any] = {}


def stream_of(method: str) -> Any:
    """An accelerator whose every weight matters."""
    if method not in _streams:
        training, shape = find_training(method), Teacher(MODEL).shape
        torch.manual_seed(4)
        module = training.build(training.config_for(shape), shape)
        disturb(module)
        _streams[method] = module.eval()
    return copy.deepcopy(_streams[method])


def drafter_of(method: str, decoder: HFDecoder, **given: Any) -> Any:
    return find(method).make_drafter(decoder, stream_of(method), given or None)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(METHODS), st.data())
def test_random_steps_equal_those_without_recordings(method: str, data: st.DataObject) -> None:
    """Waiting rows, chains and trees of drafts, over what earlier ones have left."""
    decoders = GraphedDecoder(MODEL, TapeRecorder()), HFDecoder(MODEL)
    runners = [drafter_of(method, decoder).runner for decoder in decoders]
    size, length = decoders[1].info.hidden_size, 0
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    caches = [decoder.new_cache(1, 64) for decoder in decoders]
    for runner, cache in zip(runners, caches, strict=True):
        runner.begin(cache)
    for _ in range(data.draw(st.integers(1, 4))):
        waiting = data.draw(st.integers(0, 9))
        first = Rows.causal(0, length, waiting + 1)
        parents = [data.draw(st.integers(0, i)) for i in range(data.draw(st.integers(0, 5)))]
        tree = Rows.draft_tree(0, length + waiting, parents)
        levels = [(first, waiting + 1, 1)]
        if parents:
            rest = [getattr(tree, f)[1:] for f in ("seq", "slot", "pos", "prefix", "tree")]
            levels.append((Rows(*rest), len(parents), len(parents)))
        for rows, count, fresh in levels:
            tokens = torch.randint(3, VOCAB, (count,), generator=draw).tolist()
            carried = torch.randn(count, size, generator=draw)
            said = []
            for runner in runners:
                if rows is first and waiting and not runner.keys_only:
                    runner.slow(tokens[:-1], Rows.causal(0, length, waiting))
                hidden, p = runner.step(tokens, rows, carried, fresh)
                said.append((hidden, p, *runner.top(p, 3, 2.0)))
            torch.testing.assert_close(said[0][0], said[1][0], **CLOSE)
            torch.testing.assert_close(said[0][1], said[1][1], **CLOSE)
            assert said[0][2] == said[1][2]
            np.testing.assert_allclose(said[0][3], said[1][3], rtol=1e-3, atol=1e-6)
        for cache in caches:
            cache.commit(0, waiting + 1)
        length += waiting + 1
    recorded = runners[0]._recorded
    assert recorded is not None and recorded.fallback is None and runners[1]._recorded is None


@pytest.mark.parametrize("method", METHODS)
def test_generations_are_the_base_s_and_share_recordings(method: str) -> None:
    tape = TapeRecorder()
    graphed, plain = GraphedDecoder(MODEL, EagerRecorder()), HFDecoder(MODEL)
    fixed = {"depth": 3, "draft_threshold": 0.01, "verify_threshold": 0.01}
    drafter, other = (drafter_of(method, decoder, **fixed) for decoder in (graphed, plain))
    graphed.recorder = tape

    def rounds() -> list[Any]:
        found = []
        for seed, length in enumerate((5, 30, 11)):
            prompts = [ids(1, length, seed)[0].tolist()]
            base_s = generate(plain, PlainStep(), prompts, stop=STOP).sequences
            with_tape = generate(graphed, SpeculativeStep(drafter), prompts, stop=STOP)
            without = generate(plain, SpeculativeStep(other), prompts, stop=STOP)
            assert with_tape.sequences == without.sequences == base_s
            found.append((with_tape.stats.drafted, with_tape.stats.accepted))
        return found

    first = rounds()
    assert sum(drafted for drafted, _ in first) and tape.recorded and tape.replayed
    recorded = tape.recorded
    assert rounds() == first and tape.recorded == recorded
    assert drafter.runner._recorded.fallback is None


def test_sequences_side_by_side_run_without_recordings_of_their_own_layer() -> None:
    graphed, plain = GraphedDecoder(MODEL, TapeRecorder()), HFDecoder(MODEL)
    prompts = [[3, 4, 5], [9], [8, 7]]
    out = generate(graphed, SpeculativeStep(drafter_of("m2r2-carry", graphed)), prompts, stop=STOP)
    assert out.sequences == generate(plain, PlainStep(), prompts, stop=STOP).sequences


class _Wrong(EagerRecorder):
    def record(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return lambda: function() * 1.1


def test_a_function_that_reads_the_device_falls_back_and_says_so() -> None:
    graphed = GraphedDecoder(MODEL, TapeRecorder())
    rows = RecordedRows(graphed)
    x = torch.randn(3, 4)
    with pytest.warns(UserWarning, match="kernel by kernel.*not permitted when stream"):
        out = rows.alone("reads", lambda x: x * float(x.sum()), x)
    assert torch.equal(out, x * float(x.sum())) and rows.fallback is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(rows.alone("other", torch.neg, x), -x)


def test_a_recording_that_gives_other_numbers_is_not_used() -> None:
    graphed = GraphedDecoder(MODEL, EagerRecorder())
    graphed.recorder = _Wrong()
    rows, x = RecordedRows(graphed), torch.randn(3, 4)
    with pytest.warns(UserWarning, match="other numbers .relative difference 1.0e-01"):
        assert torch.equal(rows.alone("negated", torch.neg, x), -x)
    assert torch.equal(rows.alone("negated", torch.neg, x), -x)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2**62)), min_size=1, max_size=4))
def test_slots_seen_on_the_device_are_those_of_the_rows(numbers: list[tuple[int, int]]) -> None:
    prefix, tree = (np.array(column, np.int64) for column in zip(*numbers, strict=True))
    expected = visible_slots(prefix.astype(np.int32), tree, 128)
    assert np.array_equal(seen_slots(*map(torch.from_numpy, (prefix, tree)), 128), expected)
