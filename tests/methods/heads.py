"""What holds of every method whose heads read the final residual, for test_medusa and
test_hydra.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from decoding.helpers import reference, tiny
from decoding.invariants import check_invariants
from training.tiny import tokenizer, write_data, write_model
from transformers import AutoModelForCausalLM

import multirate
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.results import DecodeStats
from multirate.decoding.speculate.drafter import Drafter
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.methods._shared.teacher import Teacher
from multirate.methods.spec import find, find_training
from multirate.training.loop import train
from multirate.training.settings import TrainSettings

from .tiny import disturb, ids

PROMPTS = [[3, 7, 1, 9, 3, 7, 1], [5], [2, 2, 8, 4, 2, 2, 8, 4, 2]]


def heads_for(method: str, teacher: Teacher, scale: float = 0.1, **options: Any) -> Any:
    """Random heads of a method for a teacher's model."""
    training = find_training(method)
    heads = training.build(training.config_for(teacher.shape, **options), teacher.shape)
    disturb(heads, scale)
    return heads.requires_grad_(False)


def check_short_text(method: str, heads: Any, teacher: Teacher, length: int) -> None:
    """Text shorter than the heads reach has no loss."""
    reach = heads.config.heads
    mask = torch.ones(1, length, dtype=torch.bool)
    objective = find_training(method).objective(teacher, heads.requires_grad_(True))
    loss, report = objective(ids(1, length), mask)
    loss.backward()
    assert report.result.agree.shape == (reach, max(0, length - reach))
    assert (float(loss.detach()) == 0) == (length <= reach)


def check_greedy(drafter: Drafter, batch: int, penalty: float) -> DecodeStats:
    """The text of `tiny()` is transformers' own."""
    model, decoder = tiny()
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
    return out.stats


def check_sampled(drafter: Drafter, batch: int, sampling: SamplingSettings) -> DecodeStats:
    """A seed's text of `tiny()` is plain decoding's."""
    _, decoder = tiny()
    stop = StopSettings(max_new_tokens=24)
    plain = generate(decoder, PlainStep(), PROMPTS[:batch], sampling, stop)
    out = generate(decoder, SpeculativeStep(drafter), PROMPTS[:batch], sampling, stop)
    assert out.sequences == plain.sequences
    return out.stats


def check_training(method: str, options: dict[str, Any], folder: Path, steps: int) -> None:
    """The loss falls, agreement rises well above what one token in the alphabet gives by chance,
    and the loaded heads draft the same text.
    """
    data = write_data(folder / "chat.jsonl")
    base = write_model(folder / "model", data, steps=60)
    results = {}
    for count in (1, steps):
        settings = TrainSettings(
            steps=count,
            lr=0.1,
            tokens_per_batch=512,
            max_length=64,
            warmup_steps=1,
            precision="fp32",
        )
        done = train(base, [data], folder / str(count), method, settings, options)
        results[count] = done.results["terms"]
        assert "early_exit" not in done.results
    for before, after in zip(results[1], results[steps], strict=True):
        assert after["kl"] < 0.8 * before["kl"]
    assert results[steps][0]["agreement"] > max(0.2, results[1][0]["agreement"] + 0.05)
    saved = json.loads((folder / str(steps) / "accelerator.json").read_text())
    assert saved["config"].items() >= options.items()
    assert find(method).title in (folder / str(steps) / "README.md").read_text()

    model = AutoModelForCausalLM.from_pretrained(base).eval()
    engine = multirate.attach(model, folder / str(steps))
    question = json.loads(data.read_text().splitlines()[0])["instruction"]
    text = f"<|user|>{question}<|end|>\n<|assistant|>"
    prompt = tokenizer()(text, add_special_tokens=False)["input_ids"]
    stop = engine.stopping(24)
    out = engine.generate([prompt], stop=stop, method=method, speculate="always")
    assert out.sequences == [reference(model, prompt, 24)]
    assert out.stats.accepted > 0


def check_native(method: str, settings: dict[str, Any] | None = None) -> None:
    """On the native decoder in bf16 the text is the plain loop's own, greedy and sampled."""
    from .test_kangaroo import native_base

    decoder, shape = native_base()
    training = find_training(method)
    heads = training.build(training.config_for(shape), shape)
    disturb(heads, 0.02)
    drafter = find(method).make_drafter(decoder, heads.bfloat16(), settings)
    assert drafter is not None
    stop = StopSettings(max_new_tokens=20)
    for sampling in (SamplingSettings(), SamplingSettings(1.0, seed=3)):
        plain = generate(decoder, PlainStep(), [[3, 4, 5], [9]], sampling, stop)
        out = generate(decoder, SpeculativeStep(drafter), [[3, 4, 5], [9]], sampling, stop)
        assert out.sequences == plain.sequences
        assert out.stats.drafted > 0
    assert drafter.costs(decoder).costs.draft_step > 0
