"""Token recycling: the matrix is what the target said, and whatever it holds the text is the
target's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoding.helpers import reference, tiny
from decoding.test_lossless_sampling import ALARM, SETTINGS, VOCAB, analytic, p_value, sampled

from multirate.decoding.invariants import check_invariants
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.session import Session
from multirate.decoding.speculative import SpeculativeStep
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.methods.spec import find
from multirate.methods.token_recycling.config import TokenRecyclingConfig
from multirate.methods.token_recycling.decode import TokenRecyclingDrafter, static_tree

PROMPTS = [[3, 7, 1, 9, 3, 7, 1], [5], [2, 2, 8, 4, 2, 2, 8, 4, 2]]


def drafter(decoder: Any, **settings: Any) -> TokenRecyclingDrafter:
    made = find("token_recycling").make_drafter(decoder, settings=settings)
    assert isinstance(made, TokenRecyclingDrafter)
    return made


@pytest.mark.parametrize(
    "settings", [{}, {"k": 1, "tree": [1, 1]}, {"k": 64, "tree": [30, 20, 13]}]
)
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
    counts = sampled(SETTINGS[setting], drafter(decoder, k=3, tree=[3, 2]))
    assert p_value(counts, analytic(SETTINGS[setting], 5)) > ALARM


def test_the_matrix_holds_what_the_target_said() -> None:
    """After every step: the target's best tokens after each row that was accepted; of rejected
    rows, too.
    """
    model, decoder = tiny()
    made = drafter(decoder, k=3)
    done = [0]  # rows whose entries have been looked at
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
        rejected += len(set(made._drafted[0]) & made._successors.keys() - newest.keys())

    stop = StopSettings(max_new_tokens=20)
    generate(decoder, SpeculativeStep(made), PROMPTS[:1], stop=stop, after_step=check)
    assert len(done) > 5
    assert rejected


def test_the_tree_grows_where_successors_are_likely() -> None:
    assert static_tree([3, 3, 1], 8) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (4, 0)]
    assert static_tree([3, 2], 1) == [(0, 0), (1, 0)]  # no more children than successors


def test_settings_refuse() -> None:
    for settings, message in (
        ({"k": 0}, "'k' is 0; accepted: a whole number from 1 to 64"),
        ({"tree": []}, "'tree' is .*at least 1, 63 in all"),
        ({"tree": [40, 30]}, "63 in all"),
        ({"tree": 4}, "'tree' is 4"),
        ({"width": 4}, "no setting 'width'; accepted: k, tree"),
    ):
        with pytest.raises(UserError, match=message):
            find("token_recycling").read_settings(settings)
    assert TokenRecyclingConfig().tree == find("token_recycling").read_settings().tree
