"""Token recycling: the matrix is what the target said, and whatever it holds the text is the
target's.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from decoding.helpers import path_tokens, reference, tiny
from decoding.invariants import check_invariants
from decoding.test_lossless_sampling import ALARM, SETTINGS, VOCAB, analytic, p_value, sampled

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.sampler import Sampler
from multirate.decoding.session import Session
from multirate.decoding.speculate.drafter import Draft, DraftRequest, Verified
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.methods.spec import find
from multirate.methods.token_recycling.decode import (
    RankRates,
    TokenRecyclingDrafter,
    static_tree,
)

PROMPTS = [[3, 7, 1, 9, 3, 7, 1], [5], [2, 2, 8, 4, 2, 2, 8, 4, 2]]


def drafter(decoder: Any, **settings: Any) -> TokenRecyclingDrafter:
    made = find("token_recycling").make_drafter(decoder, settings=settings)
    assert isinstance(made, TokenRecyclingDrafter)
    return made


@pytest.mark.parametrize("settings", [{}, {"k": 1}, {"k": 64}])
@pytest.mark.parametrize(("batch", "penalty"), [(1, 1.0), (3, 1.4)])
def test_greedy_is_generate(settings: dict[str, Any], batch: int, penalty: float) -> None:
    model, decoder = tiny()
    made = drafter(decoder, **settings)
    for _ in range(2):  # a second generation begins with an empty matrix
        out = generate(
            decoder,
            SpeculativeStep(made),
            PROMPTS[:batch],
            SamplingSettings(repetition_penalty=penalty),
            StopSettings(max_new_tokens=24),
            after_step=check_invariants,
        )
        for prompt, sequence in zip(PROMPTS, out.sequences, strict=False):
            assert sequence == reference(model, prompt, 24, repetition_penalty=penalty)
    assert out.stats.accepted > 0


def test_an_end_inside_a_draft_ends_the_text() -> None:
    model, decoder = tiny()
    text = [*PROMPTS[0], *reference(model, PROMPTS[0], 40)]
    made = drafter(decoder)
    begin_empty = made.begin

    def begin_knowing(cache: Any, sampler: Sampler) -> None:
        begin_empty(cache, sampler)
        made._successors = {token: [following] for token, following in pairwise(text)}

    made.begin = begin_knowing  # type: ignore[method-assign]
    inside = 0
    for begin in range(20, 40, 2):
        first, end = text[begin], text[begin + 1]  # the end is the first token that is drafted
        if first == end:
            continue
        stop = StopSettings(max_new_tokens=9, eos_token_ids=(end,))
        out = generate(decoder, SpeculativeStep(made), [text[:begin]], stop=stop)
        assert out.sequences == [[first, end]]
        inside += out.stats.accepted > 0
    assert inside


@pytest.mark.parametrize("setting", ["plain", "top_p", "all"])
def test_sampling_keeps_the_distribution(setting: str) -> None:
    _, decoder = tiny(5, vocab=VOCAB)
    counts = sampled(SETTINGS[setting], drafter(decoder, k=3))
    assert p_value(counts, analytic(SETTINGS[setting], 5)) > ALARM


def test_the_matrix_holds_what_the_target_said() -> None:
    """After every step: the target's best tokens after each row that was accepted; of rejected
    rows, too.
    """
    model, decoder = tiny()
    made = drafter(decoder, k=3)
    told: list[int] = []  # of the last draft
    hears = made.accept

    def accept(seq: int, verified: Verified) -> None:
        told[:] = verified.tokens
        hears(seq, verified)

    made.accept = accept  # type: ignore[method-assign]
    done = [len(PROMPTS[0])]  # rows whose entries have been looked at
    rejected = 0

    def check(session: Session, step: Step) -> None:
        nonlocal rejected
        if session.stops.reasons[0] is not None:
            return  # drafters are not told of a finished sequence's last step
        tokens = session.sampler.tokens[0]
        with torch.no_grad():
            best = model(torch.tensor([tokens])).logits[0].topk(3).indices.tolist()
        newest = dict(zip(tokens[done[-1] : -1], best[done[-1] : -1], strict=True))
        assert newest.items() <= made._successors.items()
        done.append(len(tokens) - 1)
        rejected += len(set(told) & made._successors.keys() - newest.keys())

    stop = StopSettings(max_new_tokens=20)
    generate(decoder, SpeculativeStep(made), PROMPTS[:1], stop=stop, after_step=check)
    assert len(done) > 5
    assert rejected


def test_the_tree_grows_where_successors_are_likely() -> None:
    assert static_tree([3, 3, 1], 8) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (4, 0)]
    assert static_tree([3, 2], 1) == [(0, 0), (1, 0)]  # no more children than successors


def test_a_grown_tree_has_the_nodes_whose_chance_is_worth_their_row() -> None:
    """Against all nodes of a full tree, sorted by chance."""
    _, decoder = tiny()
    made = drafter(decoder, k=3, nodes=9)
    made.rates.of = np.array([0.5, 0.25, 0.125])
    made._successors = {1: [2, 3, 4], 2: [1, 3, 5], 3: [1, 6], 4: [2]}
    chances = {(1,): 1.0}
    for _ in range(6):
        for path, chance in list(chances.items()):
            for rank, token in enumerate(made._successors.get(path[-1], ())):
                chances[(*path, token)] = chance * made.rates.of[rank]
    for worth in ([0.06] * 9, np.linspace(0.1, 0.3, 9), [0.6] * 9, [0.0] * 9):
        sampler, least = Sampler(SamplingSettings(), [[1]]), np.array(worth)
        draft = made.draft(DraftRequest([0], [8], sampler, least))[0]
        draft.check()
        expected = sorted((chance for path, chance in chances.items() if path[1:]), reverse=True)
        count = next((i for i, c in enumerate(expected[:9]) if c < least[i]), 9)
        paths = [(1, *path) for path in path_tokens(draft)[1:]]
        assert [chances[path] for path in paths] == expected[:count]
        assert len(set(paths)) == count
    assert draft.tokens, "the last threshold lets all nodes in"


def test_rates_are_how_often_each_rank_was_right() -> None:
    rates = RankRates(4)
    for i in range(4000):
        rates.observe([5, 6, 7, 8], [5, 6, 5, 9][i % 4])
    assert rates.of == pytest.approx([0.5, 0.25, 0.0, 0.0], abs=0.01)
    assert (np.diff(rates.of) <= 0).all()


def test_an_adaptive_step_says_what_rows_are_worth_and_the_text_stays() -> None:
    model, decoder = tiny()
    made, asked = drafter(decoder), []
    draft = made.draft

    def noted(request: DraftRequest) -> list[Draft]:
        asked.append(request.worth)
        return draft(request)

    made.draft = noted  # type: ignore[method-assign]
    step = SpeculativeStep(made)
    step.adapt(decoder, True)
    for prompt in PROMPTS:
        out = generate(decoder, step, [prompt], stop=StopSettings(max_new_tokens=24))
        assert out.sequences == [reference(model, prompt, 24)]
    assert asked and all(len(worth) == made.traits.max_nodes for worth in asked)
    assert all((np.diff(worth) >= 0).all() for worth in asked)
    step.adapt(decoder, False)
    generate(decoder, step, [PROMPTS[0]], stop=StopSettings(max_new_tokens=4))
    assert asked[-1] is None


def test_settings_refuse() -> None:
    for settings, message in (
        ({"k": 0}, "'k' is 0; accepted: a whole number from 1 to 64"),
        ({"nodes": 0}, "'nodes' is 0; accepted: from 1 to 63"),
        ({"width": 4}, "no setting 'width'; accepted: lookup, texts, k, nodes"),
    ):
        with pytest.raises(UserError, match=message):
            find("token_recycling").read_settings(settings)
