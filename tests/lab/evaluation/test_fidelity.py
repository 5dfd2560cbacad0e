"""Figures of fidelity: what they are by definition, for models whose logits are known."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from multirate.fidelity import DecoderReader, ModelReader, fidelity, fixed_texts
from multirate.loading.hub import load_model
from multirate.runtime.load import load_decoder

VOCABULARY = 50
TEXTS = [list(range(20)), [3, 1, 4, 1, 5, 9, 2, 6], [7]]  # the last one predicts nothing
POSITIONS = 19 + 7


@dataclass
class Random:
    """Logits by token, scaled, with noise of a size."""

    scale: float = 1.0
    noise: float = 0.0

    def logits(self, ids: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(VOCABULARY, VOCABULARY, generator=generator)
        more = torch.randn(VOCABULARY, VOCABULARY, generator=generator)
        return (self.scale * table + self.noise * more)[ids]


def test_a_model_agrees_with_itself_whatever_constant_is_added() -> None:
    class Shifted(Random):
        def logits(self, ids: Tensor) -> Tensor:
            return super().logits(ids) + 7

    found = fidelity(Random(), Shifted(), TEXTS)
    assert found.positions == POSITIONS and found.agreement == 1
    assert found.perplexity == pytest.approx(found.full_perplexity)
    assert found.divergence == pytest.approx(0, abs=1e-5)


def test_figures_are_those_of_their_definitions() -> None:
    full, other = Random(3), Random(3, noise=2)
    found = fidelity(full, other, TEXTS)
    surprise, divergence, same = 0.0, 0.0, 0
    for text in TEXTS:
        for before, token in itertools.pairwise(text):
            p, q = (one.logits(torch.tensor([before]))[0].double() for one in (full, other))
            log_p, log_q = p.log_softmax(0), q.log_softmax(0)
            surprise -= log_q[token].item()
            divergence += sum(
                math.exp(a) * (a - b) for a, b in zip(log_p.tolist(), log_q.tolist(), strict=True)
            )
            same += int(p.argmax() == q.argmax())
    assert found.perplexity == pytest.approx(math.exp(surprise / POSITIONS), rel=1e-5)
    assert found.divergence == pytest.approx(divergence / POSITIONS, rel=1e-4)
    assert found.agreement == same / POSITIONS < 1
    uniform = fidelity(Random(0), other, TEXTS)
    assert uniform.full_perplexity == pytest.approx(VOCABULARY)


def test_more_noise_costs_more() -> None:
    costs = [fidelity(Random(3), Random(3, noise), TEXTS) for noise in (0.0, 0.3, 3.0)]
    assert costs[0].divergence < costs[1].divergence < costs[2].divergence
    assert costs[0].agreement >= costs[1].agreement > costs[2].agreement


def test_one_sentence_says_it() -> None:
    said = str(fidelity(Random(0), Random(0), TEXTS))
    assert said == "perplexity 50.00 → 50.00 (+0.0%), the same best token at 100.0% of 26 positions"


def test_a_decoder_reads_as_its_model_does() -> None:
    loaded = load_model("tiny", "float32", "cpu")
    texts = fixed_texts(loaded.tokenizer, 100)
    assert len(texts) == 6 and all(len(text) == 100 for text in texts)
    reader = DecoderReader(load_decoder(loaded.model, "hf"))
    model = ModelReader(loaded.model)
    for text in texts[:2]:
        ids = torch.tensor(text)
        torch.testing.assert_close(reader.logits(ids), model.logits(ids), rtol=1e-3, atol=1e-3)
