"""Lookahead decoding: what its window collects, and that it is drafted and accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoding.helpers import path_tokens, reference, tiny
from decoding.invariants import check_invariants

from multirate.decoding.loop import generate
from multirate.decoding.sampler import Sampler, SamplingSettings
from multirate.decoding.speculate.drafter import Draft, DraftRequest, Verified
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.methods.spec import find

PROMPTS = [[3, 7, 1, 9], [5], [2, 2, 8, 4, 11, 6, 1]]


def simulate(steps: int, prompt: list[int], **settings: Any) -> list[Draft]:
    """Drafts of a model that says the last token plus one (modulo 10) after any text."""
    _, decoder = tiny(0)
    drafter = find("lookahead").make_drafter(decoder, settings=settings)
    assert drafter is not None
    sampler, drafts = Sampler(SamplingSettings(), [prompt]), []
    drafter.begin(None, sampler)  # type: ignore[arg-type]
    for _ in range(steps):
        last = sampler.tokens[0][-1]
        draft = drafter.draft(DraftRequest([0], [9], sampler))[0]
        draft.check()
        drafts.append(draft)
        nodes = [last, *draft.tokens]
        says = [(token + 1) % 10 for token in nodes]
        path = [0]
        while (child := draft.child(path[-1], says[path[-1]])) is not None:
            path.append(child)
        sampler.tokens[0] += [says[node] for node in path]
        drafter.accept(0, Verified(path, nodes, torch.zeros(0), top=[[token] for token in says]))
    return drafts


def test_the_window_collects_n_grams_that_are_then_drafted() -> None:
    drafts = simulate(12, [0, 3, 6, 1, 8, 4], ngram=3, window=5, guesses=2)
    paths = [path_tokens(draft) for draft in drafts]
    text = {(first % 10, (first + 1) % 10) for first in range(10)}
    # at first only the window's one level, then both of them
    assert [max(draft.depths) for draft in drafts[:2]] == [6, 6]
    assert not any(len(draft.tokens) > 5 * 2 + 2 * 2 for draft in drafts)
    found = [tuple(path) for path in paths[-1] if len(path) == 2]
    assert text & set(found)


def test_equal_nodes_are_one_and_deeper_ones_come_later() -> None:
    for draft in simulate(10, [1, 1, 1], ngram=4, window=3, guesses=3):
        assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft.tokens)
        assert draft.depths == sorted(draft.depths)


@pytest.mark.parametrize("settings", [{}, {"ngram": 2}, {"ngram": 5, "window": 7, "guesses": 7}])
def test_greedy_is_generate_with_guesses_accepted(settings: dict[str, int]) -> None:
    model, decoder = tiny(1)
    drafter = find("lookahead").make_drafter(decoder, settings=settings)
    assert drafter is not None
    out = generate(
        decoder,
        SpeculativeStep(drafter),
        PROMPTS,
        stop=StopSettings(max_new_tokens=30),
        after_step=check_invariants,
    )
    assert out.sequences == [reference(model, prompt, 30) for prompt in PROMPTS]
    assert out.stats.accepted > 0
