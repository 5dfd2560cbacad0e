"""What methods to come need of the interfaces, by an example each: two models, heads, tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.invariants import check_invariants
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.speculate.drafter import Drafter
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.runtime.decoder import Decoder

from .examples import HeadsDrafter, TableDrafter, TwoModelDrafter
from .helpers import ScriptedDrafter, reference, tiny

PROMPTS = [[3, 7, 1, 9], [5], [2, 2, 8, 4, 11, 6, 1]]
STOP = StopSettings(max_new_tokens=20)
EXAMPLES: dict[str, Callable[[Decoder], Drafter]] = {
    "two_models": lambda decoder: TwoModelDrafter(tiny(1)[1]),
    "the_same_model_twice": lambda decoder: TwoModelDrafter(decoder),
    "heads": HeadsDrafter,
    "table": TableDrafter,
}


@pytest.mark.parametrize("penalty", [1.0, 1.4])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", EXAMPLES)
def test_greedy_text_is_transformers(name: str, batch: int, penalty: float) -> None:
    model, decoder = tiny(0)
    drafter = EXAMPLES[name](decoder)
    sampling = SamplingSettings(repetition_penalty=penalty)
    for _ in range(2):  # a drafter serves one generation after the other
        out = generate(
            decoder,
            SpeculativeStep(drafter),
            PROMPTS[:batch],
            sampling,
            STOP,
            after_step=check_invariants,
        )
        expected = [reference(model, p, 20, repetition_penalty=penalty) for p in PROMPTS[:batch]]
        assert out.sequences == expected
    if name == "the_same_model_twice":
        assert out.stats.acceptance == 1 and out.stats.tokens_per_step > 3
    if name == "table":
        assert out.stats.accepted > 0


def test_two_models_sample_the_targets_distribution() -> None:
    from .test_lossless_sampling import ALARM, SETTINGS, analytic, p_value, sampled

    drafter = TwoModelDrafter(tiny(6, vocab=6)[1], length=2)
    assert p_value(sampled(SETTINGS["all"], drafter, 300), analytic(SETTINGS["all"], 5)) > ALARM


def residuals(model: Any, text: list[int]) -> tuple[Tensor, Tensor]:
    """By transformers: [T, d] entering layer 1, and normed after the last layer."""
    with torch.no_grad():
        out = model.model(torch.tensor([text]), output_hidden_states=True)
    return out.hidden_states[1][0], out.last_hidden_state[0]


@pytest.mark.parametrize("batch", [1, 3])
def test_rejected_rows_and_taps_are_the_models_own(batch: int) -> None:
    model, decoder = tiny(0)
    drafter = TableDrafter(decoder)
    out = generate(decoder, SpeculativeStep(drafter), PROMPTS[:batch], stop=STOP)
    assert len(drafter.rejected) > 10
    for text, hidden, tapped in drafter.rejected[:40]:
        after_one, normed = residuals(model, text)
        torch.testing.assert_close(tapped, after_one[-1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(decoder.norm(hidden[None])[0], normed[-1], atol=1e-4, rtol=1e-4)
    for b, parts in drafter.tapped.items():
        seen = torch.cat(parts)
        after_one, _ = residuals(model, [*PROMPTS[b], *out.sequences[b]])
        torch.testing.assert_close(seen, after_one[: len(seen)], atol=1e-4, rtol=1e-4)


def test_taps_below_the_verified_layers_are_refused() -> None:
    drafter = ScriptedDrafter(lambda *_: ([], []), tiny(0)[1], start=2)
    drafter.traits = replace(drafter.traits, taps=(1,))
    with pytest.raises(ValueError, match="below layer 2"):
        SpeculativeStep(drafter)
    with pytest.raises(ValueError, match=r"outside layers 1\.\.3"):
        _, decoder = tiny(0)
        decoder.layers_with_taps(torch.zeros(0, 16), None, 1, 3, None, (0,))  # type: ignore[arg-type]
