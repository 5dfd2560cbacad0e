"""Drafters joined to the text: whoever drafts, the text is the model's own, and the drafter keeps
up with steps that it did not draft.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from decoding.helpers import tiny
from decoding.invariants import check_invariants

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.session import Session
from multirate.decoding.speculate.drafter import Draft, Drafter, DraftRequest, Traits, Verified
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.methods._shared import joined_drafter
from multirate.methods._shared.joined_drafter import JoinedDrafter
from multirate.methods._shared.teacher import Teacher
from multirate.methods.spec import find
from multirate.methods.two_model.decode import TwoModelConfig, TwoModelDrafter

from .heads import PROMPTS, check_greedy, check_sampled, heads_for


def token_recycling(**settings: Any) -> Drafter:
    made = find("token_recycling").make_drafter(tiny()[1], settings=settings)
    assert made is not None
    return made


def heads(method: str) -> Callable[..., Drafter]:
    def make(**settings: Any) -> Drafter:
        model, decoder = tiny()
        made = find(method).make_drafter(decoder, heads_for(method, Teacher(model)), settings)
        assert made is not None
        return made

    return make


def two_model(**settings: Any) -> Drafter:
    config = TwoModelConfig(**settings)
    return config.joined(TwoModelDrafter(tiny()[1], tiny(3)[1], config), tiny()[1])


DRAFTERS = {
    "token_recycling": token_recycling,
    "medusa": heads("medusa"),
    "hydra": heads("hydra"),
    "two_model": two_model,
}
EACH = pytest.mark.parametrize("method", DRAFTERS)


@EACH
@pytest.mark.parametrize(("batch", "penalty"), [(1, 1.0), (3, 1.4)])
def test_greedy_is_generate(
    method: str, batch: int, penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined_drafter, "LEAST", 2)
    check_greedy(DRAFTERS[method](lookup="sam"), batch, penalty)


@EACH
def test_a_seeds_text_is_plain_decodings(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_drafter, "LEAST", 1)
    check_sampled(DRAFTERS[method](lookup="sam"), 2, SamplingSettings(temperature=0.8, seed=3))


class Counting(Drafter):
    """Drafts nothing, and writes down what it is asked and told."""

    traits = Traits(max_nodes=3)

    def __init__(self) -> None:
        self.asked: list[int] = []  # the lengths of the texts that it was asked to go on with
        self.told: list[list[int]] = []

    def draft(self, request: DraftRequest) -> list[Draft]:
        self.asked += [len(request.sampler.tokens[b]) for b in request.seqs]
        return [Draft([], []) for _ in request.seqs]

    def accept(self, seq: int, verified: Verified) -> None:
        self.told.append([verified.tokens[node] for node in verified.path])


def test_the_text_drafts_where_its_match_is_long_enough_and_the_drafter_hears_of_all_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joined_drafter, "LEAST", 3)
    monkeypatch.setattr(joined_drafter, "MOST_TOKENS", 4)
    _, decoder = tiny()
    inner = Counting()
    drafter = JoinedDrafter(inner, None, decoder)
    step, copied = SpeculativeStep(drafter), []
    step.watch = lambda seq, draft, path: copied.append((len(draft.tokens), draft.copied))
    told: list[int] = []

    def check(session: Session, step: Step) -> None:
        check_invariants(session, step)
        told[:] = session.sampler.tokens[0]

    generate(decoder, step, PROMPTS[:1], stop=StopSettings(max_new_tokens=30), after_step=check)
    by_text = [length for length, _ in copied if length]
    assert by_text and max(by_text) == 4
    assert len(inner.asked) == len(copied) - len(by_text) > 0
    assert all(list(nodes) == list(range(1, length + 1)) for length, nodes in copied if length)
    # all verified tokens but those of the step that ended the text, and the last one's
    heard = [token for tokens in inner.told for token in tokens]
    first = len(PROMPTS[0])
    assert heard == told[first : first + len(heard)]
    assert len(heard) >= 20
    for length in inner.asked:
        text = told[:length]
        ends = [n for n in range(3, length) if text[n - 3 : n] == text[-3:]]
        assert not ends, "the text had three tokens that occurred before, and did not draft"


def test_a_drafter_from_within_the_model_is_not_joined_this_way() -> None:
    class Inside(Counting):
        traits = Traits(start=1)

    with pytest.raises(ValueError, match="Inside cannot leave a draft to the text"):
        JoinedDrafter(Inside(), None, tiny()[1])


def test_settings_refuse() -> None:
    for method in ("token_recycling", "medusa", "hydra", "two_model"):
        with pytest.raises(UserError, match="'lookup' is 'trie'"):
            find(method).read_settings({"lookup": "trie"})
