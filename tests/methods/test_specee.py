"""SpecEE: candidates, the features that predictors read, and which exits are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from native_kernel import skip_without_kernel
from torch import Tensor

from multirate.decoding.depth import LayerRange, Leaving
from multirate.decoding.loop import generate
from multirate.decoding.session import Session
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.lab.depth_baselines.specee import exits
from multirate.lab.depth_baselines.specee.config import SpecEEConfig, SpecEEDecodeConfig
from multirate.lab.depth_baselines.specee.exits import Predictors
from multirate.lab.depth_baselines.specee.modules import SpecEE, features, read_of
from multirate.lab.depth_baselines.specee.train import SpecEEObjective, start_from_least_squares
from multirate.methods._shared.least_squares import direction
from multirate.methods._shared.shape import BaseShape
from multirate.methods._shared.teacher import Teacher
from multirate.methods.spec import find
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.native import NativeDecoder

from .m2r2_models import LLAMA, PROMPTS, model_of
from .tiny import base, disturb, ids

LAYERS = LLAMA.num_hidden_layers
STOP = StopSettings(max_new_tokens=24)


def module_of(shape: BaseShape, **options: Any) -> SpecEE:
    torch.manual_seed(5)
    config = SpecEEConfig.for_base(shape, **{"exits": [1, 2, 3], "rank": 20, **options})
    module = SpecEE(config, shape)
    disturb(module, 0.1)
    return module.eval().requires_grad_(False)


def some(teacher: Teacher) -> tuple[Tensor, Tensor]:
    mask = torch.ones(4, 12, dtype=torch.bool)
    mask[0, :4] = False
    return ids(4, 12), mask


def test_features_are_logits_their_softmax_and_its_change() -> None:
    logits = torch.tensor([[16.0, 15.0, 8.0, 0.0]])
    read, here = features(logits, None)
    torch.testing.assert_close(here, logits.softmax(-1))
    assert read.tolist() == [[*(logits / 16)[0].tolist(), *here[0].tolist(), 0, 0, 0, 0]]
    later, now = features(logits.flip(-1), here)
    torch.testing.assert_close(later[:, 8:], now - here)


@torch.no_grad()
def test_decoding_judges_as_training_did() -> None:
    module = module_of(BaseShape.of(LLAMA), exits=[1, 3])
    predictors = Predictors(module)
    before, known = None, None
    for exit in (1, 3, 1, 3):
        logits = 20 * torch.randn(1, 4)
        read, before = features(logits, before)
        wanted = module.judge(module.exits.index(exit), read).sigmoid().item()
        trust, known = predictors.trust(exit, logits[0].numpy(), known)
        assert trust == pytest.approx(wanted, abs=1e-5)
        assert 0.01 < wanted < 0.99


def test_a_token_leaves_as_a_candidate_that_the_head_says_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither as another candidate nor as another token, and only at exits that are looked at."""
    decoder = HFDecoder(model_of(LLAMA))
    module = module_of(BaseShape.of(LLAMA))
    module.first_exits.copy_(torch.tensor([3, 9, 5]))
    assert module.hot(1) == (2,) and module.hot(2) == (2, 3) and module.hot(9) == (1, 2, 3)
    monkeypatch.setattr(exits, "HOT", 1)
    step: Any = find("specee").make_step(decoder, module, {"threshold": 0.0})
    policy = step.policy
    told, scheduled = policy.leave, policy.schedule
    before: dict[int, Tensor] = {}  # what each sequence's last token left with
    wanted: dict[int, set[int]] = {}
    last: dict[int, list[int]] = {}
    counts = {True: 0, False: 0}

    def schedule(session: Session, seqs: Sequence[int]) -> Sequence[LayerRange] | None:
        for b in seqs:
            token = torch.tensor([session.sampler.tokens[b][-1]])
            read = read_of(decoder.embed(token, torch.zeros(1).numpy()), before[b][None])
            wanted[b] = set(decoder.logits(module.proposer(read)).topk(4).indices[0].tolist())
        scheduled(session, seqs)
        near = {e + i for b in seqs for e in last.get(b, [])[-5:] for i in (-2, -1, 0, 1, 2)}
        assert set(policy.exits) == {2} | (near & {1, 2, 3})
        return None

    def leave(exit: int, hidden: Tensor, seqs: Sequence[int]) -> Leaving:
        said: Leaving = told(exit, hidden, seqs)
        for i, b in enumerate(seqs):
            best = int(decoder.logits(hidden[i : i + 1]).argmax())
            near = {e + i for e in last.get(b, [])[-5:] for i in (-2, -1, 0, 1, 2)}
            assert said.rows[i] == (best in wanted[b] and exit in {2} | near)
            counts[said.rows[i]] += 1
            if said.rows[i]:
                assert said.logits is not None and int(said.logits[i].argmax()) == best
        return said

    def after_token(layers: int, hidden: Tensor, seqs: Sequence[int]) -> None:
        for b, row in zip(seqs, hidden, strict=True):
            before[b] = row
            last.setdefault(b, []).append(layers)
        noted(layers, hidden, seqs)

    def after_prompt(hidden: Tensor, seqs: Sequence[int]) -> None:
        before.update(zip(seqs, hidden, strict=True))
        read_prompt(hidden, seqs)

    noted, read_prompt = policy.after_token, policy.after_prompt
    policy.leave, policy.schedule = leave, schedule
    policy.after_token, policy.after_prompt = after_token, after_prompt
    out = generate(decoder, step, PROMPTS, stop=STOP)
    assert counts[True] and counts[False] and set(out.stats.exits) > {LAYERS}


@torch.no_grad()
def test_predictors_are_taught_where_a_token_could_leave() -> None:
    teacher = Teacher(base())
    tokens, mask = some(teacher)
    module = module_of(teacher.shape)
    loss, report = SpecEEObjective(teacher, module)(tokens, mask)
    slow = teacher.slow(tokens, shared=0, gates=(1, 2, 3))
    embedded = teacher.parts.embed(tokens, slow.position_ids)
    kl, able = [], []
    for b in range(4):
        for t in range(1, 12):
            if not mask[b, t]:
                continue
            read = read_of(embedded[b, t], slow.final[b, t - 1])
            said = teacher.head.logits(teacher.norm(module.proposer(read))[None])[0]
            model = teacher.head.logits(slow.normed[b, t][None])[0]
            log_p, log_q = model.log_softmax(-1), said.log_softmax(-1)
            kl.append(float((log_p.exp() * (log_p - log_q)).sum()))
            four = said.topk(4).indices.tolist()
            exits = [
                int(teacher.head.logits(teacher.norm(slow.residual[e][b, t])[None]).argmax())
                for e in (1, 2, 3)
            ]
            right = int(model.argmax())
            able.append([exit == right and right in four for exit in exits])
    agree = torch.tensor(able).T
    assert report.result.agree.tolist() == agree.tolist() and bool(agree.any())
    assert report.arla is not None
    judged = torch.nn.functional.binary_cross_entropy(report.arla, agree.float())
    assert float(loss) == pytest.approx(sum(kl) / len(kl) + float(judged), rel=1e-3)
    assert module.first_exits.sum() == 0, "counted in training only"
    objective = SpecEEObjective(teacher, module.train())
    objective(tokens, mask)
    first = agree.int().argmax(0)[agree.any(0)]
    assert module.first_exits.tolist() == first.bincount(minlength=3).tolist()


@torch.no_grad()
def test_the_proposer_starts_from_least_squares() -> None:
    teacher = Teacher(base())
    module = module_of(teacher.shape)
    batch = ids(8, 24), torch.ones(8, 24, dtype=torch.bool), None
    slow = teacher.slow(batch[0], shared=0)
    read = read_of(slow.residual[0][:, 1:], slow.final[:, :-1])
    wanted = direction(slow.final[:, 1:])

    def error() -> float:
        return float((module.proposer(read) - wanted).square().mean())

    before = error()
    start_from_least_squares(teacher, module, [batch])
    assert error() < 0.8 * before


def test_the_kernels_proposer_is_the_module() -> None:
    low = model_of(LLAMA, torch.bfloat16)
    skip_without_kernel()
    module = module_of(BaseShape.of(LLAMA))
    from multirate.lab.depth_baselines.specee.exits import _proposer

    read = read_of(*torch.randn(2, 3, LLAMA.hidden_size, generator=torch.manual_seed(1)))
    given = _proposer(NativeDecoder(low), module)(read)
    torch.testing.assert_close(given, module.proposer(read), rtol=0.02, atol=0.02)


def test_what_it_cannot_use_is_refused() -> None:
    shape = BaseShape.of(LLAMA)
    assert SpecEEConfig.for_base(shape).exits == (1, 2, 3)
    for wrong in ({"exits": [4]}, {"rank": 0}, {"draft_vocab": 3}, {"width": 0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            SpecEEConfig.for_base(shape, **wrong)
    for settings in ({"threshold": 1.5}, {"threshold": -0.5}):
        with pytest.raises(UserError, match=next(iter(settings))):
            SpecEEDecodeConfig(**settings)  # type: ignore[arg-type]
