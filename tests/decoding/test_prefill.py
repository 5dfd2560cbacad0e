"""Texts are read a piece at a time, by whoever reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lab.bench import tiny_model

from multirate.decoding import prefill
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.prefill import read_in_pieces, score
from multirate.decoding.stopping import StopSettings
from multirate.lab.calibration.measure import full_model_on
from multirate.lab.evaluation.likelihood import log_likelihood
from multirate.runtime.decoder import Decoder
from multirate.runtime.load import load_decoder
from multirate.training.data import Sample
from multirate.training.teacher_states import TeacherStates

PIECE, LOGITS = 8, 3


@pytest.fixture
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """Notes how many rows its calls have, and its logits."""
    monkeypatch.setattr(prefill, "PREFILL_ROWS", PIECE)
    monkeypatch.setattr(prefill, "LOGITS_AT_ONCE", LOGITS)
    native = request.param == "native"
    dtype = torch.bfloat16 if native else torch.float32
    made = load_decoder(tiny_model.model(dtype=dtype), request.param)
    sizes: dict[str, list[int]] = {"layers": [], "logits": []}

    def noting(call: Callable[..., Any], seen: list[int]) -> Callable[..., Any]:
        def noted(x: torch.Tensor, *rest: Any) -> Any:
            seen.append(len(x))
            return call(x, *rest)

        return noted

    for name, seen in sizes.items():
        monkeypatch.setattr(made, name, noting(getattr(made, name), seen))
    monkeypatch.setattr(made, "sizes", sizes, raising=False)
    return made


both = pytest.mark.parametrize("decoder", ["hf", "native"], indirect=True)


def text(length: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(5, 261, (length,), generator=draw).tolist()


def most(decoder: Any) -> tuple[int, int]:
    return max(decoder.sizes["layers"]), max(decoder.sizes["logits"])


@both
def test_the_likelihood_of_a_long_text_is_read_as_a_prompt_is(decoder: Decoder) -> None:
    context, continuation = text(30), text(21, seed=1)
    for split in (1, 8, 9, 30):  # where the scored part begins, within a piece and at its borders
        decoder.sizes["layers"].clear()  # type: ignore[attr-defined]
        whole = [*context[:split], *continuation]
        log_likelihood(decoder, context[:split], continuation)
        assert most(decoder) == (PIECE, LOGITS)
        assert sum(decoder.sizes["layers"]) == len(whole) - 1  # type: ignore[attr-defined]
        with torch.no_grad():
            model = tiny_model.model().eval()
            logits = model(torch.tensor([whole])).logits[0, split - 1 : -1]
        expected = logits.log_softmax(-1)[range(21), continuation]
        each, chosen = score(decoder, context[:split], continuation)
        tolerance = 1e-4 if decoder.info.dtype == torch.float32 else 0.2
        assert torch.allclose(torch.tensor(each), expected, atol=tolerance)
        if decoder.info.dtype == torch.float32:
            assert chosen == logits.argmax(-1).tolist()


@both
def test_calibration_and_prompts_are_read_in_pieces(decoder: Decoder) -> None:
    prompt = text(29)
    said = generate(decoder, PlainStep(), [prompt], stop=StopSettings(max_new_tokens=20))
    verdict = full_model_on(decoder, prompt, said.sequences[0])
    assert (verdict.tokens, verdict.differing) == (20, 0) and verdict.nats > 0
    assert most(decoder) == (PIECE, LOGITS)


@both
def test_teacher_states_are_read_in_pieces(decoder: Decoder, tmp_path: Any) -> None:
    ids = torch.tensor(text(27)).numpy()
    samples = [Sample(ids, ids > 0), Sample(ids[:5], ids[:5] > 0)]
    states = TeacherStates(tmp_path, samples, decoder.info.hidden_size, "base", taps=(1,))
    states.compute(decoder)
    assert max(decoder.sizes["layers"]) == PIECE  # type: ignore[attr-defined]
    found = states.batch([0, 1], 27)
    assert torch.equal(found.final[0, :5], found.final[1, :5])
    assert found.residual[1][0].abs().sum(-1).min() > 0


@both
def test_short_texts_share_a_call_and_long_ones_are_cut(decoder: Decoder) -> None:
    texts = {0: text(3), 1: text(4, 1), 2: text(20, 2), 3: text(2, 3)}
    cache = decoder.new_cache(4, 20)
    read = list(read_in_pieces(decoder, cache, texts, taps=(1,)))
    layers = decoder.info.num_layers
    assert [(seq, len(states[layers])) for seq, states in read] == [
        (0, 3),
        (1, 4),
        (2, 8),
        (2, 8),
        (2, 4),
        (3, 2),
    ]
    assert cache.lengths == [3, 4, 20, 2] and all(1 in states for _, states in read)
