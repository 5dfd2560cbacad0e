"""Trusted nodes of a draft: emitted as they are, everything else is the model's own after them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decoding.invariants import check_invariants
from multirate.decoding.logits import SamplingSettings, penalise
from multirate.decoding.loop import generate
from multirate.decoding.speculate.acceptance import accept_greedy
from multirate.decoding.speculate.drafter import Draft, DraftRequest
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.stopping import StopSettings

from .helpers import ScriptedDrafter, random_tree, tiny

PROMPTS = [[3, 7, 1, 9], [5], [2, 2, 8, 4, 11, 6, 1]]


class Unverified(ScriptedDrafter):
    """Trusts some of the only children of random trees."""

    def __init__(self, decoder: Any, start: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        super().__init__(self._script, decoder if start else None, start)
        self.traits = replace(self.traits, lossless=False)
        self.made: dict[tuple[int, int], Draft] = {}  # by sequence and the place it begins at

    def _script(self, b: int, tokens: list[int], limit: int) -> tuple[list[int], list[int]]:
        head = int(self.rng.integers(0, 4))
        below, parents = random_tree(self.rng, int(self.rng.integers(0, 5)), 13)
        chain = self.rng.integers(0, 13, head).tolist()
        return [*chain, *below], [*range(head), *(head + p for p in parents)]

    def draft(self, request: DraftRequest) -> list[Draft]:
        drafts = super().draft(request)
        for draft, (b, limit) in zip(drafts, request.pairs, strict=True):
            draft.unverified = frozenset(
                node
                for node, parent in enumerate(draft.parents, start=1)
                if draft.parents.count(parent) == 1 and self.rng.random() < 0.6
            )
            place = len(request.sampler.tokens[b])
            self.made[b, place] = draft.cut(limit, self.traits.max_nodes)
        return drafts

    def trusted_places(self, b: int, text: list[int]) -> set[int]:
        """Where unverified nodes were arrived at, by walking down each draft along the text."""
        places = set()
        for (seq, place), draft in self.made.items():
            node: int | None = 0
            while seq == b and node is not None and place < len(text):
                sure = draft.unverified_child(node)
                if sure is not None:
                    assert draft.tokens[sure - 1] == text[place]
                    places.add(place)
                node = sure if sure is not None else draft.child(node, text[place])
                place += 1
        return places


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_what_is_not_trusted_is_the_models_after_the_same_text(start: int, penalty: float) -> None:
    model, decoder = tiny()
    drafter = Unverified(decoder, start, seed=start)
    step = SpeculativeStep(drafter)
    assert not step.lossless and step.costs(decoder) is None
    sampling = SamplingSettings(repetition_penalty=penalty)
    stop = StopSettings(max_new_tokens=25)
    streamed: dict[int, list[int]] = {b: [] for b in range(3)}
    out = generate(
        decoder,
        step,
        PROMPTS,
        sampling,
        stop,
        on_tokens=lambda b, new: streamed[b].extend(new),
        after_step=lambda session, step: check_invariants(session, step),
    )
    assert [streamed[b] for b in range(3)] == out.sequences
    early = 0
    for b, (prompt, tokens) in enumerate(zip(PROMPTS, out.sequences, strict=True)):
        assert len(tokens) == 25
        text = [*prompt, *tokens]
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0].float()
        unverified = drafter.trusted_places(b, text)
        for place in range(len(prompt), len(text)):
            if place in unverified:
                early += 1
                continue
            row = logits[place - 1 : place]
            if penalty != 1:
                row = penalise(row, penalty, [text[:place]])
            assert int(row.argmax()) == text[place], (b, place)
    assert early == out.stats.exits[start if start else 0] > 15
    assert sum(out.stats.exits.values()) == out.stats.tokens - 3


@pytest.mark.parametrize(
    ("parents", "unverified"), [([0, 0], 2), ([0, 1, 0], 1), ([0, 1, 1], 3), ([0], 2), ([0], 0)]
)
def test_a_trusted_node_is_an_only_child(parents: list[int], unverified: int) -> None:
    with pytest.raises(ValueError, match=f"unverified node {unverified} must be"):
        Draft([1] * len(parents), parents, unverified=frozenset({unverified})).check()


def test_trusted_nodes_are_passed_without_asking_and_cut_with_the_rest() -> None:
    draft = Draft([5, 6, 7, 8, 9], [0, 1, 1, 2, 3], unverified=frozenset({1, 4, 5}))
    draft.check()
    # the target is asked after node 1 alone, and after the last node for the bonus
    assert accept_greedy(draft, [0, 6, 0, 0, 3, 4]) == ([0, 1, 2, 4], 3)
    assert accept_greedy(draft, [0, 7, 0, 0, 3, 4]) == ([0, 1, 3, 5], 4)
    assert accept_greedy(draft, [0, 2, 0, 0, 3, 4]) == ([0, 1], 2)
    assert draft.cut(2, 63).unverified == {1} and draft.cut(9, 4).unverified == {1, 4}
