"""Medusa: heads are trained for the rows that drafting reads them at; drafting loses nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding.helpers import reference, tiny
from decoding.test_lossless_sampling import ALARM, SETTINGS, VOCAB, analytic, p_value, sampled
from training.tiny import tokenizer, write_data, write_model
from transformers import AutoModelForCausalLM

import multirate
from multirate.decoding.invariants import check_invariants
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.speculative import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.methods.common.shape import BaseShape
from multirate.methods.common.teacher import Teacher
from multirate.methods.medusa.config import MedusaConfig, MedusaDecodeConfig
from multirate.methods.medusa.decode import MedusaDrafter
from multirate.methods.medusa.modules import MedusaHeads
from multirate.methods.medusa.train import MedusaObjective
from multirate.methods.spec import find
from multirate.model.load import load_decoder
from multirate.training.loop import train
from multirate.training.settings import TrainSettings

from .tiny import base, disturb, ids

PROMPTS = [[3, 7, 1, 9, 3, 7, 1], [5], [2, 2, 8, 4, 2, 2, 8, 4, 2]]


def heads_for(model: Any, **options: Any) -> MedusaHeads:
    shape = BaseShape.of(model.config)
    heads = MedusaHeads(MedusaConfig.for_base(shape, **options), shape)
    disturb(heads, 0.1)
    return heads.requires_grad_(False)


def test_an_untrained_head_repeats_the_base() -> None:
    model = base()
    shape = BaseShape.of(model.config)
    x = torch.randn(2, 5, shape.hidden_size)
    assert torch.equal(MedusaHeads(MedusaConfig(), shape)(x), x.expand(3, 2, 5, -1))


def test_the_loss_compares_head_k_with_the_model_k_rows_later() -> None:
    teacher = Teacher(base())
    heads = heads_for(teacher.parts.model, heads=2, widths=[2, 1])
    tokens = ids(2, 9)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :4] = False  # a prompt
    mask[1, 7:] = False  # padding
    loss, report = MedusaObjective(teacher, heads, step_decay=0.5)(tokens, mask)
    normed = teacher.slow(tokens, 0).normed
    model = teacher.head.logits(normed).log_softmax(-1)
    wanted = []
    for k in (1, 2):
        drafted = teacher.head.logits(heads(normed)[k - 1]).log_softmax(-1)
        rows = [(0, t) for t in range(6, 9)] + [(1, t) for t in range(2, 7)]
        kl = [(model[b, t].exp() * (model[b, t] - drafted[b, t - k])).sum() for b, t in rows]
        wanted.append(torch.stack(kl).mean())
    torch.testing.assert_close(loss, wanted[0] + 0.5 * wanted[1], atol=1e-4, rtol=1e-4)
    assert report.result.agree.shape == (2, 8)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_text_shorter_than_the_heads_reach_has_no_loss(length: int) -> None:
    teacher = Teacher(base())
    heads = heads_for(teacher.parts.model).requires_grad_(True)
    mask = torch.ones(1, length, dtype=torch.bool)
    loss, report = MedusaObjective(teacher, heads)(ids(1, length), mask)
    loss.backward()
    assert report.result.agree.shape == (3, max(0, length - 3))
    assert (float(loss.detach()) == 0) == (length <= 3)


@pytest.mark.parametrize("widths", [[1], [3, 2, 1], [9, 5], [63]])
@pytest.mark.parametrize(("batch", "penalty"), [(1, 1.0), (3, 1.4)])
def test_greedy_is_generate(widths: list[int], batch: int, penalty: float) -> None:
    model, decoder = tiny()
    drafter = MedusaDrafter(decoder, heads_for(model), MedusaDecodeConfig(widths=tuple(widths)))
    out = generate(
        decoder,
        SpeculativeStep(drafter),
        PROMPTS[:batch],
        SamplingSettings(repetition_penalty=penalty),
        StopSettings(max_new_tokens=24),
        after_step=check_invariants,
    )
    for prompt, sequence in zip(PROMPTS, out.sequences, strict=False):
        assert sequence == reference(model, prompt, 24, repetition_penalty=penalty)
    assert out.stats.accepted > 0 or widths == [1]


def test_an_end_inside_a_draft_ends_the_text() -> None:
    model, decoder = tiny()
    text = [*PROMPTS[0], *reference(model, PROMPTS[0], 40)]
    made = MedusaDrafter(decoder, heads_for(model), MedusaDecodeConfig(widths=(9, 5)))
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
    model, decoder = tiny(5, vocab=VOCAB)
    drafter = MedusaDrafter(decoder, heads_for(model), MedusaDecodeConfig(widths=(3, 2)))
    assert p_value(sampled(SETTINGS[setting], drafter), analytic(SETTINGS[setting], 5)) > ALARM


def test_trained_saved_and_loaded(tmp_path: Path) -> None:
    """The loss falls, the first head's held-out agreement rises, and the loaded heads draft the
    same text.
    """
    data = write_data(tmp_path / "chat.jsonl")
    folder = write_model(tmp_path / "model", data, steps=100)
    results = {}
    for steps in (1, 150):
        settings = TrainSettings(
            steps=steps,
            lr=0.1,
            tokens_per_batch=512,
            max_length=64,
            warmup_steps=1,
            precision="fp32",
        )
        options = {"heads": 2, "widths": [2, 1]}
        done = train(folder, [data], tmp_path / str(steps), "medusa", settings, options)
        results[steps] = done.results["terms"]
        assert "early_exit" not in done.results
    for before, after in zip(results[1], results[150], strict=True):
        assert after["kl"] < 0.8 * before["kl"]
    assert results[150][0]["agreement"] > results[1][0]["agreement"] + 0.05
    saved = json.loads((tmp_path / "150" / "accelerator.json").read_text())
    assert saved["config"] == {"heads": 2, "widths": [2, 1]}
    assert find("medusa").title in (tmp_path / "150" / "README.md").read_text()

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = multirate.attach(model, tmp_path / "150")
    stop = engine.stopping(24)
    question = json.loads(data.read_text().splitlines()[0])["instruction"]
    text = f"<|user|>{question}<|end|>\n<|assistant|>"
    prompt = tokenizer()(text, add_special_tokens=False)["input_ids"]
    out = engine.generate([prompt], stop=stop, method="medusa", speculate="always")
    assert out.sequences == [reference(model, prompt, 24)]
    assert out.stats.accepted > 0


def test_on_the_native_decoder() -> None:
    """In bf16 the text is the plain loop's own, bit for bit."""
    from .test_kangaroo import native_base

    decoder, shape = native_base()
    heads = MedusaHeads(MedusaConfig(), shape)
    disturb(heads, 0.02)
    drafter = MedusaDrafter(decoder, heads.bfloat16(), MedusaDecodeConfig())
    stop = StopSettings(max_new_tokens=20)
    from multirate.decoding.plain import PlainStep

    plain = generate(decoder, PlainStep(), [[3, 4, 5], [9]], stop=stop)
    out = generate(decoder, SpeculativeStep(drafter), [[3, 4, 5], [9]], stop=stop)
    assert out.sequences == plain.sequences
    assert drafter.costs(decoder).costs.draft_step > 0


def test_refusals() -> None:
    model = base()
    decoder = load_decoder(model, "hf")
    for options, message in (
        ({"heads": 0}, "'heads' is 0; accepted: a whole number from 1 to 16"),
        ({"heads": 1}, "'widths' is .*at most `heads`"),
        ({"widths": [9, 9]}, "'widths' is .*at most 63 nodes"),
        ({"width": 2}, "no field 'width'"),
    ):
        with pytest.raises(UserError, match=message):
            MedusaConfig.for_base(BaseShape.of(model.config), **options)
    with pytest.raises(UserError, match=r"widths are \[1, 1, 1, 1\]; .* heads for 3 depths"):
        MedusaDrafter(decoder, heads_for(model), MedusaDecodeConfig(widths=(1, 1, 1, 1)))
    with pytest.raises(UserError, match="needs an accelerator trained with --method medusa"):
        find("medusa").make_drafter(decoder)
