"""Medusa: heads are trained for the rows that drafting reads them at; drafting loses nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decoding.helpers import reference, tiny
from decoding.test_lossless_sampling import ALARM, SETTINGS, VOCAB, analytic, p_value, sampled

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.engine import Engine, attach
from multirate.errors import UserError
from multirate.methods._shared.shape import BaseShape
from multirate.methods._shared.teacher import Teacher
from multirate.methods.medusa.config import MedusaConfig, MedusaDecodeConfig
from multirate.methods.medusa.decode import MedusaDrafter
from multirate.methods.medusa.modules import MedusaHeads
from multirate.methods.medusa.runner import MedusaRunner, PackedMedusaRunner, make_runner
from multirate.methods.medusa.train import MedusaObjective
from multirate.methods.spec import find
from multirate.runtime.draft_branch import DraftWeights
from multirate.runtime.load import load_decoder
from multirate.training.checkpoint import Accelerator

from . import heads as every
from .test_kangaroo import native_base
from .tiny import base, ids

PROMPTS = every.PROMPTS


def heads_for(model: Any, **options: Any) -> MedusaHeads:
    made: MedusaHeads = every.heads_for("medusa", Teacher(model), **options)
    return made


def drafter_for(model: Any, decoder: Any, widths: tuple[int, ...] = (3, 2, 1)) -> MedusaDrafter:
    return MedusaDrafter(decoder, heads_for(model), MedusaDecodeConfig(widths=widths))


def test_an_untrained_head_repeats_the_base() -> None:
    model = base()
    shape = BaseShape.of(model.config)
    x = torch.randn(2, 5, shape.hidden_size)
    assert torch.equal(MedusaHeads(MedusaConfig(), shape)(x), x.expand(3, 2, 5, -1))


def test_the_loss_compares_head_k_with_the_model_k_rows_later() -> None:
    teacher = Teacher(base())
    heads = heads_for(teacher.parts.model, heads=2)
    tokens = ids(2, 9)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :4] = False  # a prompt
    mask[1, 7:] = False  # padding
    loss, report = MedusaObjective(teacher, heads)(tokens, mask)
    normed = teacher.slow(tokens, 0).normed
    model = teacher.head.logits(normed).log_softmax(-1)
    wanted = []
    for k in (1, 2):
        drafted = teacher.head.logits(heads(normed)[k - 1]).log_softmax(-1)
        rows = [(0, t) for t in range(6, 9)] + [(1, t) for t in range(2, 7)]
        kl = [(model[b, t].exp() * (model[b, t] - drafted[b, t - k])).sum() for b, t in rows]
        wanted.append(torch.stack(kl).mean())
    torch.testing.assert_close(loss, wanted[0] + 0.8 * wanted[1], atol=1e-4, rtol=1e-4)
    assert report.result.agree.shape == (2, 8)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_text_shorter_than_the_heads_reach_has_no_loss(length: int) -> None:
    teacher = Teacher(base())
    every.check_short_text("medusa", heads_for(teacher.parts.model), teacher, length)


@pytest.mark.parametrize("widths", [(1,), (3, 2, 1), (9, 5), (63,)])
@pytest.mark.parametrize(("batch", "penalty"), [(1, 1.0), (3, 1.4)])
def test_greedy_is_generate(widths: tuple[int, ...], batch: int, penalty: float) -> None:
    stats = every.check_greedy(drafter_for(*tiny(), widths), batch, penalty)
    assert stats.accepted > 0 or widths == (1,)


def test_an_end_inside_a_draft_ends_the_text() -> None:
    model, decoder = tiny()
    text = [*PROMPTS[0], *reference(model, PROMPTS[0], 40)]
    made = drafter_for(model, decoder, (9, 5))
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
    drafter = drafter_for(*tiny(5, vocab=VOCAB), (3, 2))
    assert p_value(sampled(SETTINGS[setting], drafter), analytic(SETTINGS[setting], 5)) > ALARM


def test_a_seeds_text_is_plain_decodings() -> None:
    every.check_sampled(drafter_for(*tiny()), 3, SamplingSettings(1.0, seed=3))


def test_trained_saved_and_loaded(tmp_path: Path) -> None:
    every.check_training("medusa", {"heads": 2}, tmp_path, 150)


def test_on_the_native_decoder() -> None:
    every.check_native("medusa")


@pytest.mark.parametrize(("weights", "error"), [("bf16", 0.03), ("int8", 0.1)])
@pytest.mark.parametrize("draft_vocab", [40, None])
def test_packed_heads_are_the_heads(
    weights: DraftWeights, error: float, draft_vocab: int | None
) -> None:
    decoder, shape = native_base()
    heads = MedusaHeads(MedusaConfig.for_base(shape, draft_vocab=draft_vocab), shape)
    every.disturb(heads, 0.05)
    heads.requires_grad_(False)
    packed = make_runner(decoder, heads, weights)
    plain = MedusaRunner(decoder, heads)
    assert isinstance(packed, PackedMedusaRunner)
    hidden, found = torch.randn(5, 128), []
    for runner in (packed, plain):
        for count in (1, 3):
            students = runner.students(hidden, count)
            found.append((students, *runner.top(students, 4)))
    for (ours, _, probs), (theirs, _, wanted) in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=error, rtol=0.02)
        torch.testing.assert_close(torch.tensor(probs), torch.tensor(wanted), atol=error, rtol=0.02)
    said = {token for _, tokens, _ in found for row in tokens for token in row}
    assert (max(said) < 40) == (draft_vocab == 40)


def test_a_reduced_head_drafts_its_own_tokens_alone() -> None:
    model, decoder = tiny()
    heads = heads_for(model, draft_vocab=7)
    assert heads.draft_tokens is not None
    heads.draft_tokens.copy_(torch.arange(0, 13, 2))
    made = MedusaDrafter(decoder, heads, MedusaDecodeConfig())
    step, drafted = SpeculativeStep(made), set[int]()
    step.watch = lambda b, draft, nodes: drafted.update(draft.tokens)
    out = generate(decoder, step, PROMPTS, stop=StopSettings(max_new_tokens=24))
    assert out.sequences == [reference(model, prompt, 24) for prompt in PROMPTS]
    assert len(drafted) > 3 and not any(token % 2 for token in drafted)


def engine_with_heads() -> tuple[Any, Engine]:
    model, _ = tiny()
    heads = heads_for(model)
    engine = attach(model, backend="hf")
    engine.add(Accelerator("medusa", heads.config, heads, {}))
    return model, engine


def test_refusals() -> None:
    model = base()
    decoder = load_decoder(model, "hf")
    for options, message in (
        ({"heads": 0}, "'heads' is 0; accepted: a whole number from 1 to 16"),
        ({"widths": [2]}, "no field 'widths'"),
        ({"draft_vocab": 1}, "'draft_vocab' is 1; accepted: null or at least 2"),
        ({"draft_vocab": 9999}, "'draft_vocab' is 9999; accepted: at most the base model's"),
    ):
        with pytest.raises(UserError, match=message):
            MedusaConfig.for_base(BaseShape.of(model.config), **options)
    with pytest.raises(UserError, match=r"'widths' is .*at most 63 nodes"):
        MedusaDecodeConfig(widths=(9, 9))
    with pytest.raises(UserError, match=r"widths are \[1, 1, 1, 1\], .* heads for only 3 depths"):
        drafter_for(model, decoder, (1, 1, 1, 1))
    with pytest.raises(UserError, match="needs an accelerator trained with --method medusa"):
        find("medusa").make_drafter(decoder)
