"""The reference is transformers' text, and every real step emits the blocks that it emits."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.drafter import Draft
from multirate.decoding.speculate.reference import speculative_decode
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.stopping import StopSettings

from .helpers import ScriptedDrafter, random_tree, reference, tiny

Propose = Callable[[Sequence[int]], Draft]
PROMPT, COUNT = [3, 1, 2, 3, 7], 24
SETTINGS = [
    SamplingSettings(),
    SamplingSettings(repetition_penalty=1.3),
    SamplingSettings(temperature=1.0, seed=5),
    SamplingSettings(temperature=0.7, top_k=4, top_p=0.9, repetition_penalty=1.2, seed=9),
]


def trees(text: Sequence[int]) -> Draft:
    """Random trees, empty ones among them, which depend on nothing but the text's length."""
    rng = np.random.default_rng(len(text))
    return Draft(*random_tree(rng, int(rng.integers(0, 12)), 13))


def chains(text: Sequence[int]) -> Draft:
    """What followed the last token when it occurred before."""
    text = list(text)
    before = [i for i, token in enumerate(text[:-1]) if token == text[-1]]
    return Draft.chain(text[before[-1] + 1 :][:4] if before else [])


def test_its_greedy_text_is_that_of_transformers() -> None:
    model, decoder = tiny()
    expected = reference(model, PROMPT, COUNT)
    truth = [*PROMPT, *expected]
    oracle_steps = []
    for propose in (trees, chains, lambda text: Draft.chain(truth[len(text) :][:5])):
        sampler = Sampler(SamplingSettings(), [PROMPT])
        steps = speculative_decode(decoder, propose, sampler, COUNT)
        assert [token for step in steps for token in step][:COUNT] == expected
        oracle_steps.append(len(steps))
    assert oracle_steps[-1] == COUNT / 6  # five drafted tokens and the model's own


@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "penalty", "sampled", "all"])
@pytest.mark.parametrize("propose", [trees, chains])
def test_a_step_emits_its_blocks(settings: SamplingSettings, propose: Propose) -> None:
    _, decoder = tiny()

    def script(seq: int, text: list[int], limit: int) -> tuple[list[int], list[int]]:
        draft = propose(text)
        return draft.tokens, draft.parents

    emitted: list[list[int]] = []
    generate(
        decoder,
        SpeculativeStep(ScriptedDrafter(script)),
        [PROMPT],
        settings,
        StopSettings(max_new_tokens=COUNT + 12),
        on_tokens=lambda b, tokens: emitted.append(tokens),
    )
    first, *blocks = emitted  # the loop's first token comes from the prefill, without a draft
    sampler = Sampler(settings, [PROMPT])
    sampler.tokens[0] += first
    expected = speculative_decode(decoder, propose, sampler, COUNT)
    assert blocks[: len(expected)] == expected  # later drafts are cut where the text must end
    assert propose is chains or any(len(block) > 1 for block in expected)


def test_the_documentation_shows_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text()
    [shown] = re.findall(r"```python\n(def speculative_decode.*?)```", page, re.DOTALL)
    [real] = ast.parse(inspect.getsource(speculative_decode)).body
    assert isinstance(real, ast.FunctionDef)
    real.body = real.body[1:]  # the page has the docstring in its own words
    assert ast.unparse(ast.parse(shown)) == ast.unparse(real)
