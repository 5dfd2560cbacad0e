"""Trusted nodes of a draft: emitted as they are, everything else is the model's own after them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from multirate.decoding.drafter import Draft
from multirate.decoding.invariants import check_invariants
from multirate.decoding.logits import SamplingSettings, penalise
from multirate.decoding.loop import generate
from multirate.decoding.speculative import SpeculativeStep
from multirate.decoding.stopping import StopSettings

from .helpers import ScriptedDrafter, random_tree, tiny

PROMPTS = [[3, 7, 1, 9], [5], [2, 2, 8, 4, 11, 6, 1]]


class Trusting(ScriptedDrafter):
    """Trusts the first few tokens of random drafts, trees below them included."""

    lossless = False

    def __init__(self, decoder: Any, start: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        super().__init__(self._script, decoder if start else None, start)
        self.places: set[tuple[int, int]] = set()  # of trusted tokens: sequence, place in its text

    def _script(self, b: int, tokens: list[int], limit: int) -> tuple[list[int], list[int]]:
        self.count = int(self.rng.integers(0, 4))
        below, parents = random_tree(self.rng, int(self.rng.integers(0, 5)), 13)
        chain = self.rng.integers(0, 13, self.count).tolist()
        return [*chain, *below], [*range(self.count), *(self.count + p for p in parents)]

    def draft(self, seqs: Any, last_tokens: Any, limits: Any, sampler: Any) -> list[Draft]:
        drafts = []
        for b, last, limit in zip(seqs, last_tokens, limits, strict=True):
            [draft] = super().draft([b], [last], [limit], sampler)
            draft.trusted = self.count
            self.places |= {(b, len(sampler.tokens[b]) + i) for i in range(min(self.count, limit))}
            drafts.append(draft)
        return drafts


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_what_is_not_trusted_is_the_models_after_the_same_text(start: int, penalty: float) -> None:
    model, decoder = tiny()
    drafter = Trusting(decoder, start, seed=start)
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
        for place in range(len(prompt), len(text)):
            if (b, place) in drafter.places:
                early += 1
                continue
            row = logits[place - 1 : place]
            if penalty != 1:
                row = penalise(row, penalty, [text[:place]])
            assert int(row.argmax()) == text[place], (b, place)
    assert early == out.stats.exits[start if start else 0] > 15
    assert sum(out.stats.exits.values()) == out.stats.tokens - 3


@pytest.mark.parametrize(
    ("parents", "trusted"), [([0, 0], 2), ([0, 1, 0], 2), ([0, 1, 1], 2), ([0], 2)]
)
def test_trusted_nodes_are_a_chain_above_all_others(parents: list[int], trusted: int) -> None:
    with pytest.raises(ValueError, match="trusted nodes must be a chain"):
        Draft([1] * len(parents), parents, trusted=trusted).check()


def test_what_is_left_to_verify() -> None:
    draft = Draft([5, 6, 7, 8], [0, 1, 2, 2], trusted=2, probs=torch.eye(4))
    rest = draft.verified
    assert (rest.tokens, rest.parents, rest.trusted) == ([7, 8], [0, 0], 0)
    assert rest.probs is not None and torch.equal(rest.probs, torch.eye(4)[2:])
    assert draft.cut(1, 63).trusted == 1 and draft.cut(2, 63).trusted == 2
    plain = Draft([5], [0])
    assert plain.verified is plain
