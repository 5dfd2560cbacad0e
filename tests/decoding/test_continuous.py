"""Continuous batching: every answer is what its prompt gives alone, in whatever company it is
decoded.
"""

from __future__ import annotations

import pytest

from multirate.decoding import batch
from multirate.decoding.continuous import generate_continuously
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError

from .helpers import MAX_POSITIONS, tiny

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [2, 2], [11, 3, 1], [7], [9, 8, 7, 6], [12, 1]]


def run(prompts, places, **settings):
    _, decoder = tiny()
    waiting = iter(prompts)
    return list(generate_continuously(decoder, lambda: next(waiting, None), places, **settings))


@pytest.mark.parametrize("batch", [1, 3, 20])
def test_answers_are_those_of_a_prompt_alone(batch):
    stop = StopSettings(max_new_tokens=12, eos_token_ids=(3, 7))
    _, decoder = tiny()
    found = run(PROMPTS, batch, stop=stop)
    assert sorted(f.number for f in found) == list(range(len(PROMPTS)))
    assert len({len(f.tokens) for f in found}) > 2  # rows are filled again at different times
    for finished in found:
        alone = generate(decoder, PlainStep(), [PROMPTS[finished.number]], stop=stop)
        assert finished.tokens == alone.sequences[0]
        assert finished.reason == alone.finish_reasons[0]


def test_free_places_of_a_large_batch_are_filled_together(monkeypatch):
    read, read_rows = [], batch.read_rows

    def noted(decoder, cache, parts, *arguments):
        read.append(len(parts))
        return read_rows(decoder, cache, parts, *arguments)

    monkeypatch.setattr(batch, "read_rows", noted)
    stop = StopSettings(max_new_tokens=12, eos_token_ids=(3, 7))
    found = run(PROMPTS * 12, 48, stop=stop)
    assert sorted(f.number for f in found) == list(range(96))
    assert read[0] == 48 and min(read[1:-1]) >= 3 and sum(read) == 96


def test_sampled_answers_depend_on_their_number_only():
    settings = {
        "sampling": SamplingSettings(temperature=1.0, seed=5),
        "stop": StopSettings(max_new_tokens=10, eos_token_ids=(3,)),
    }
    same = [[1, 2]] * 9
    first = {f.number: f.tokens for f in run(same, 2, **settings)}
    assert {f.number: f.tokens for f in run(same, 7, **settings)} == first
    assert len({tuple(tokens) for tokens in first.values()}) > 4
    later = {f.number: f.tokens for f in run(same[:5], 2, first_number=4, **settings)}
    assert later == {number: first[number] for number in range(4, 9)}


def test_an_answer_may_lead_to_a_further_prompt():
    _, decoder = tiny()
    waiting, seen = [[1, 2, 3], [4, 5]], []
    answers = generate_continuously(
        decoder, lambda: waiting.pop(0) if waiting else None, 2, stop=StopSettings(4)
    )
    for finished in answers:
        seen.append(finished)
        if finished.number == 0:
            waiting.append([1, 2, 3, *finished.tokens])
    assert [f.number for f in seen] == [0, 1, 2]
    whole = generate(decoder, PlainStep(), [[1, 2, 3]], stop=StopSettings(8)).sequences[0]
    assert seen[0].tokens + seen[2].tokens == whole


def test_no_prompt_no_answer_and_a_prompt_without_room_ends_at_once():
    assert run([], 4) == []
    full = [1] * MAX_POSITIONS
    found = run([full, [1, 2], full], 1, stop=StopSettings(3))
    assert [(f.number, len(f.tokens), f.reason) for f in found] == [
        (0, 0, "context"),
        (1, 3, "length"),
        (2, 0, "context"),
    ]
    with pytest.raises(UserError, match="prompt 1 is empty"):
        run([[1], []], 1, stop=StopSettings(3))
