"""Hydra: a head's guess depends on the tokens drafted before it, in drafting as in training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding.helpers import path_tokens, tiny
from decoding.test_lossless_sampling import ALARM, SETTINGS, VOCAB, analytic, p_value, sampled
from torch import Tensor

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.speculate.drafter import Draft
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.methods._shared.shape import BaseShape
from multirate.methods._shared.teacher import Teacher
from multirate.methods.hydra.config import HydraConfig, HydraDecodeConfig
from multirate.methods.hydra.decode import HydraDrafter
from multirate.methods.hydra.modules import HydraHeads
from multirate.methods.hydra.runner import HydraRunner, PackedHydraRunner, make_runner
from multirate.methods.hydra.train import HydraObjective, start_from_least_squares
from multirate.methods.spec import find
from multirate.runtime.draft_branch import DraftWeights
from multirate.runtime.rows import Rows

from . import heads as every
from .tiny import base, disturb, ids

EVERY_NODE = {"draft_threshold": 0.0, "verify_threshold": 0.0}


def drafter_for(model: Any, decoder: Any, options: Any = None, **settings: Any) -> HydraDrafter:
    heads = every.heads_for("hydra", Teacher(model), 0.3, **(options or {}))
    return HydraDrafter(decoder, heads, HydraDecodeConfig(**(EVERY_NODE | settings)))


def said(teacher: Teacher, heads: HydraHeads, tokens: Sequence[int], known: int) -> Tensor:
    """By the formulas, on the whole text: what head `known` says, log-probabilities [V], of the
    token after `tokens`, whose last `known` are not verified.
    """
    text = torch.tensor([tokens])
    slow = teacher.slow(text, 0)
    final = heads.prefix(slow.final)[0]
    z = teacher.norm(final)[:, len(tokens) - known - 1]
    for place in range(len(tokens) - known, len(tokens)):
        z = heads.joined(z, slow.residual[0][:, place])
    return teacher.head.logits(heads.student(known, z))[0].log_softmax(-1)


def test_an_untrained_head_repeats_the_base() -> None:
    teacher = Teacher(base())
    heads = HydraHeads(HydraConfig.for_base(teacher.shape), teacher.shape)
    tokens = ids(1, 9)[0].tolist()
    normed = teacher.slow(torch.tensor([tokens]), 0).normed
    for k in (1, 4):
        repeated = teacher.head.logits(normed[0, 8 - k : 9 - k])[0].log_softmax(-1)
        torch.testing.assert_close(said(teacher, heads, tokens, k), repeated)


def test_the_loss_gives_each_head_the_texts_tokens() -> None:
    teacher = Teacher(base())
    options = {"heads": 2, "layers": 2}
    heads = every.heads_for("hydra", teacher, **options)
    tokens = ids(2, 9)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :4] = False  # a prompt
    mask[1, 7:] = False  # padding
    loss, report = HydraObjective(teacher, heads)(tokens, mask)
    model = teacher.head.logits(teacher.slow(tokens, 0).normed).log_softmax(-1)
    rows = [(0, t) for t in range(6, 9)] + [(1, t) for t in range(2, 7)]
    wanted = []
    for k in (1, 2):
        students = [said(teacher, heads, tokens[b, : t + 1].tolist(), k) for b, t in rows]
        pairs = zip(rows, students, strict=True)
        kl = [(model[b, t].exp() * (model[b, t] - student)).sum() for (b, t), student in pairs]
        wanted.append(torch.stack(kl).mean())
    torch.testing.assert_close(loss, wanted[0] + 0.8 * wanted[1], atol=1e-4, rtol=1e-4)
    assert report.result.agree.shape == (2, 8)


def test_training_starts_from_least_squares() -> None:
    """Already nearer to the model, on other rows than those it was fitted to."""
    teacher = Teacher(base())
    heads = HydraHeads(HydraConfig.for_base(teacher.shape, heads=2), teacher.shape)
    objective = HydraObjective(teacher, heads)

    def kl() -> Tensor:
        tokens = ids(4, 60, seed=90)
        result = objective(tokens, torch.ones_like(tokens, dtype=torch.bool))[1].result
        return result.kl.detach()

    before, batches = kl(), [ids(8, 120, seed) for seed in range(8)]
    known = [(tokens, torch.ones_like(tokens, dtype=torch.bool), None) for tokens in batches]
    start_from_least_squares(teacher, heads, known)
    assert (kl() < 0.8 * before).all()


def test_text_shorter_than_the_heads_reach_has_no_loss() -> None:
    teacher = Teacher(base())
    for length in (1, 3, 4, 5):
        every.check_short_text("hydra", every.heads_for("hydra", teacher), teacher, length)


def test_drafts_are_what_the_heads_say_of_each_path() -> None:
    """Every node is among its parent's likeliest tokens, in the order of the parent's
    probabilities: from the whole text, while drafting goes on from step to step in a batch.
    """
    model, decoder = tiny()
    drafter = drafter_for(model, decoder, nodes=9, width=2)
    teacher, step = Teacher(model), SpeculativeStep(drafter)
    texts = {b: list(prompt) for b, prompt in enumerate(every.PROMPTS)}
    before: dict[int, int] = {}
    deepest = compared = 0

    def watch(b: int, draft: Draft, nodes: Sequence[int]) -> None:
        nonlocal deepest, compared
        known = texts[b][: before[b]]
        before[b] = len(texts[b])
        for path, parent in zip(path_tokens(draft)[1:], draft.parents, strict=True):
            *above, token = path
            logs = said(teacher, drafter.heads, [*known, *above], len(above) + 1)
            assert token in logs.topk(3).indices.tolist()
            siblings = [t for t, p in zip(draft.tokens, draft.parents, strict=True) if p == parent]
            assert logs.argmax() in siblings or len(siblings) < 2
            deepest, compared = max(deepest, len(path)), compared + 1

    def emitted(b: int, tokens: Sequence[int]) -> None:
        texts[b] += tokens
        before.setdefault(b, len(texts[b]))  # the first token is the prefill's

    step.watch = watch
    generate(decoder, step, every.PROMPTS, stop=StopSettings(12), on_tokens=emitted)
    assert deepest >= 3 and compared > 60


def test_a_threshold_leaves_unlikely_paths_out() -> None:
    model, decoder = tiny()
    few = drafter_for(model, decoder, draft_threshold=1.0, verify_threshold=1.0)
    assert every.check_greedy(few, 1, 1.0).drafted == 0
    chain = drafter_for(model, decoder, width=1, nodes=2, depth=2)
    assert every.check_greedy(chain, 1, 1.0).drafted > 0
    all_tokens = drafter_for(model, decoder, width=12, nodes=13, depth=1)
    stats = every.check_greedy(all_tokens, 1, 1.0)
    assert stats.accepted == stats.sequence_steps - 1 == 11  # the last step has room for one token


@pytest.mark.parametrize(
    ("options", "batch", "penalty"),
    [
        ({}, 1, 1.0),
        ({"heads": 2, "layers": 2}, 3, 1.4),
        ({"heads": 3, "layers": 1, "draft_vocab": 7}, 3, 1.0),
    ],
)
def test_text_is_the_models_own(options: dict[str, Any], batch: int, penalty: float) -> None:
    """Greedy and sampled, whatever random heads draft."""
    drafter = drafter_for(*tiny(), options)
    assert every.check_greedy(drafter, batch, penalty).drafted > 0
    warm = SamplingSettings(1.0, repetition_penalty=penalty, seed=3)
    assert every.check_sampled(drafter, batch, warm).drafted > 0


def test_sampling_keeps_the_distribution() -> None:
    few = {"heads": 2, "layers": 1}
    drafter = drafter_for(*tiny(5, vocab=VOCAB), few, nodes=5)
    assert p_value(sampled(SETTINGS["all"], drafter), analytic(SETTINGS["all"], 5)) > ALARM


def test_trained_saved_and_loaded(tmp_path: Path) -> None:
    every.check_training("hydra", {"heads": 2, "layers": 2, "draft_vocab": 128}, tmp_path, 60)


def test_on_the_native_decoder() -> None:
    every.check_native("hydra", EVERY_NODE)


@pytest.mark.parametrize(("weights", "error"), [("bf16", 0.03), ("int8", 0.1)])
def test_packed_heads_are_the_heads(weights: DraftWeights, error: float) -> None:
    from .test_kangaroo import native_base

    decoder, shape = native_base()
    heads = HydraHeads(HydraConfig.for_base(shape, layers=2, draft_vocab=40), shape)
    disturb(heads, 0.05)
    heads.requires_grad_(False)
    packed = make_runner(decoder, heads, weights)
    plain = HydraRunner(decoder, heads)
    assert isinstance(packed, PackedHydraRunner)
    hidden, embedded = torch.randn(11, 128), torch.randn(2, 11, 128)
    found = []
    for runner in (packed, plain):
        cache = runner.new_cache(1, 16)
        parts = [(0, 6), (6, 7), (7, 11)]
        read = [runner.prefixed(hidden[a:b], Rows.causal(0, a, b - a), cache) for a, b in parts]
        z = torch.cat(read)
        for k, tokens in enumerate(embedded, start=1):
            z, y = runner.student(k, z, tokens)
        found.append((y, runner.top(y, 5)))
    (ours, (tokens, probs)), (theirs, (_, wanted)) = found
    torch.testing.assert_close(ours, theirs, atol=error, rtol=0.02)
    torch.testing.assert_close(torch.tensor(probs), torch.tensor(wanted), atol=error, rtol=0.02)
    assert max(map(max, tokens)) < 40


def test_refusals() -> None:
    model, decoder = tiny()
    shape = BaseShape.of(model.config)
    for options, message in (
        ({"heads": 17}, "'heads' is 17; accepted: a whole number from 1 to 16"),
        ({"layers": 0}, "'layers' is 0; accepted: a whole number from 1 to 16"),
        ({"draft_vocab": 14}, "'draft_vocab' is 14; accepted: at most the base model's 13"),
        ({"widths": [1]}, "no field 'widths'"),
    ):
        with pytest.raises(UserError, match=message):
            HydraConfig.for_base(shape, **options)
    for settings, message in (
        ({"nodes": 64}, "'nodes' is 64; accepted: from 1 to 63"),
        ({"width": 17}, "'width' is 17"),
        ({"depth": 0}, "'depth' is 0; accepted: null, or at least 1"),
        ({"draft_threshold": 1.5}, "'draft_threshold' is 1.5; accepted: a number from 0 to 1"),
    ):
        with pytest.raises(UserError, match=message):
            drafter_for(model, decoder, **settings)
    with pytest.raises(UserError, match="needs an accelerator trained with --method hydra"):
        find("hydra").make_drafter(decoder)
