"""How likely a text is, against the model itself."""

from __future__ import annotations

import pytest
import torch

from lab.bench import tiny_model
from multirate.engine import attach
from multirate.lab.evaluation.likelihood import log_likelihood


@pytest.mark.parametrize("length", [1, 5, 150])
def test_log_likelihood_is_the_models(length: int) -> None:
    network = tiny_model.model()
    decoder = attach(network).decoder
    torch.manual_seed(length)
    context, continuation = torch.randint(5, 261, (7,)), torch.randint(5, 261, (length,))
    with torch.no_grad():
        logits = network(torch.cat([context, continuation])[None]).logits[0, 6:-1]
    expected = logits.log_softmax(-1)[range(length), continuation].double().sum()
    found, greedy = log_likelihood(decoder, context.tolist(), continuation.tolist())
    assert found == pytest.approx(float(expected), rel=1e-5) and not greedy


def test_what_greedy_decoding_says_is_known_as_such() -> None:
    engine = attach(tiny_model.model())
    prompt = [7, 30, 99]
    said = engine.generate([prompt], stop=engine.stopping(80)).sequences[0]
    assert log_likelihood(engine.decoder, prompt, said)[1]
    said[70] ^= 1
    assert not log_likelihood(engine.decoder, prompt, said)[1]


def test_nothing_is_certain() -> None:
    assert log_likelihood(attach(tiny_model.model()).decoder, [7], []) == (0.0, True)
