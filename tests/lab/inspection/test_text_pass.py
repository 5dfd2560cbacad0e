"""What is read of a text, against transformers' own hidden states and M2R2's training pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from methods.m2r2_models import LLAMA, model_of, stream_of
from runtime.tiny_models import prompts, tiny_model

from multirate.lab.inspection import residuals as measures
from multirate.lab.inspection.text_pass import CHUNK, read_text
from multirate.methods._shared.teacher import Teacher
from multirate.methods.m2r2.tracing import M2R2Tracer
from multirate.methods.m2r2.train import M2R2Objective
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.hf.inspect import find_parts

ANSWER = 12


@torch.no_grad()
def own_states(model: Any, text: torch.Tensor) -> list[torch.Tensor]:
    """h_0 … h_L by transformers. The last of its hidden states is normed; a hook has what the
    norm is given.
    """
    last: list[torch.Tensor] = []
    norm = find_parts(model).norm
    hook = norm.register_forward_pre_hook(lambda _, given: last.append(given[0]))
    states = model(text[None], output_hidden_states=True).hidden_states
    hook.remove()
    return [*(state[0] for state in states[:-1]), last[0].reshape(states[0].shape)[0]]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "olmoe"])
def test_plain_residual(name: str) -> None:
    model = tiny_model(name)
    prompt, answer = prompts(CHUNK + 3, ANSWER)
    found = read_text(HFDecoder(model), prompt.tolist(), answer.tolist())
    text = torch.cat([prompt, answer[:-1]])
    states = [state[len(prompt) - 1 :] for state in own_states(model, text)]
    expected = {
        "velocity": measures.velocity(states),
        "residual_direction": measures.residual_direction(states),
        "change_direction": measures.change_direction(states),
        "alignment": measures.alignment(states, states[-1]),
    }
    for field, value in expected.items():
        np.testing.assert_allclose(getattr(found, field), value, atol=2e-3, rtol=2e-3)
    with torch.no_grad():
        logits = model(text[None]).logits[0, len(prompt) - 1 :]
        norm = find_parts(model).norm
        early = torch.stack([model.get_output_embeddings()(norm(one)) for one in states[1:]])
    assert [said.tokens[0] for said in found.said] == logits.argmax(-1).tolist()
    best = torch.softmax(logits.float(), -1).amax(-1)
    assert [said.probabilities[0] for said in found.said] == pytest.approx(best.tolist(), abs=1e-3)
    agrees = (early.argmax(-1) == logits.argmax(-1)).numpy()
    assert found.agrees.shape == (model.config.num_hidden_layers, ANSWER)
    np.testing.assert_array_equal(found.agrees, agrees)
    assert not found.agrees[0].all(), "an early exit that always agrees tests nothing"
    first = [int(np.flatnonzero(column)[0]) + 1 for column in agrees.T]
    assert found.first_agreeing_layers() == first


@pytest.mark.parametrize(
    ("preset", "options"),
    [("m2r2", {"gates": [1, 3]}), ("m2r2-carry", {}), ("m2r2-carry", {"gates": [2]})],
)
def test_accelerated_residual_is_what_training_computes(
    preset: str, options: dict[str, Any]
) -> None:
    model = model_of(LLAMA)
    stream = stream_of(LLAMA, preset, rank=4, **options)
    torch.manual_seed(1)
    prompt = torch.randint(3, LLAMA.vocab_size, (CHUNK - 4,)).tolist()
    answer = torch.randint(3, LLAMA.vocab_size, (ANSWER,)).tolist()
    decoder = HFDecoder(model)
    found = read_text(decoder, prompt, answer, M2R2Tracer(decoder, stream))
    teacher = Teacher(model)
    objective = M2R2Objective(teacher, stream)
    with torch.no_grad():
        slow = objective.slow(torch.tensor([[*prompt, *answer[:-1]]]))
        outputs, _ = objective.first_step(slow)
        normed = torch.stack([teacher.norm(one[0, len(prompt) - 1 :]) for one in outputs])
        target = slow.final[0, len(prompt) - 1 :]
        logits = teacher.head.logits(normed)
        scores = objective.arla_logits(normed.float()).sigmoid()
    assert [one.gate for one in found.intervals] == list(stream.config.gates)
    for j, one in enumerate(found.intervals):
        expected = measures.alignment([outputs[j][0, len(prompt) - 1 :]], target)[0]
        np.testing.assert_allclose(one.read_alignment, expected, atol=1e-3)
        assert [said.tokens[0] for said in one.said] == logits[j].argmax(-1).tolist()
        arla = [said.scores["ARLA"] for said in one.said]
        assert arla == pytest.approx(scores[j].tolist(), abs=1e-3)
        confidence = torch.softmax(2.0 * logits[j], -1).amax(-1).tolist()
        found_confidence = [said.scores["confidence"] for said in one.said]
        assert found_confidence == pytest.approx(confidence, abs=1e-3)
    gates = found.first_agreeing_gates()
    for row, gate in enumerate(gates):
        agreeing = [one.gate for one in found.intervals if one.read_agrees[row]]
        assert gate == (agreeing[0] if agreeing else None)
