"""EAGLE and EAGLE-3: drafting computes what training computes; drafting loses nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoding.helpers import tiny
from decoding.invariants import check_invariants
from decoding.test_lossless_sampling import ALARM, SETTINGS, VOCAB, analytic, p_value, sampled
from native_kernel import skip_without_kernel
from traces import trace

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.session import Session
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.methods import spec
from multirate.methods._shared.branch_drafter import BranchDrafter
from multirate.methods._shared.draft_runner import PackedRunner
from multirate.methods._shared.feature_drafter import FeatureRunner
from multirate.methods._shared.objective import shift
from multirate.methods._shared.shape import BaseShape
from multirate.methods._shared.teacher import Teacher
from multirate.runtime.decoder import Decoder
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.native import NativeDecoder
from multirate.runtime.rows import Rows

from .fused_steps import assert_fused_steps_are_steps_in_parts
from .m2r2_models import LLAMA, OTHERS, PROMPTS, model_of
from .tiny import base, disturb, ids

METHODS = ["eagle", "eagle3"]
CHAIN: dict[str, Any] = {"draft_threshold": 0.05, "verify_threshold": 0.02}
TREE: dict[str, Any] = {
    "depth": 4,
    "width": 3,
    "nodes": 14,
    "draft_threshold": 0.0,
    "verify_threshold": 0.0,
}


def layer_of(method: str, shape: BaseShape, seed: int = 0, **options: Any) -> Any:
    training = spec.find_training(method)
    torch.manual_seed(seed)
    layer = training.build(training.config_for(shape, **options), shape)
    disturb(layer, 0.05, seed)
    return layer.eval().requires_grad_(False)


def drafter_of(method: str, decoder: Decoder, layer: Any, **settings: Any) -> BranchDrafter:
    made = spec.find(method).make_drafter(decoder, layer, settings)
    assert isinstance(made, BranchDrafter)
    return made


@pytest.fixture(scope="module")
def decoders() -> dict[str, Decoder]:
    made: dict[str, Decoder] = {"hf": HFDecoder(model_of(LLAMA))}
    low = model_of(LLAMA, torch.bfloat16)
    if NativeDecoder.supports(low) is None:
        made["native"] = NativeDecoder(low)
    return made


def need(decoders: dict[str, Decoder], backend: str) -> Decoder:
    if backend not in decoders:
        skip_without_kernel()
    return decoders[backend]


@pytest.mark.parametrize("backend", ["hf", "native"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("settings", [CHAIN, TREE, CHAIN | {"lookup": "sam"}])
def test_greedy_is_the_base_token_for_token(
    decoders: dict[str, Decoder], backend: str, method: str, settings: dict[str, Any]
) -> None:
    decoder = need(decoders, backend)
    stop = StopSettings(max_new_tokens=16)
    check = check_invariants if backend == "hf" else None
    for prompts in (PROMPTS, PROMPTS[:1])[: 1 if backend == "hf" else 2]:
        plain = generate(decoder, PlainStep(), prompts, stop=stop)
        layer = layer_of(method, BaseShape.of(LLAMA), draft_vocab=20 if settings is TREE else None)
        step = SpeculativeStep(drafter_of(method, decoder, layer, **settings))
        out = generate(decoder, step, prompts, stop=stop, after_step=check)
        assert out.sequences == plain.sequences
        assert out.stats.drafted > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", OTHERS)
def test_greedy_is_the_base_on_other_architectures(name: str, method: str) -> None:
    decoder = HFDecoder(model_of(OTHERS[name]))
    layer = layer_of(method, Teacher(model_of(OTHERS[name])).shape)
    sampling, stop = SamplingSettings(repetition_penalty=1.2), StopSettings(max_new_tokens=12)
    plain = generate(decoder, PlainStep(), PROMPTS, sampling, stop)
    step = SpeculativeStep(drafter_of(method, decoder, layer, **TREE))
    out = generate(decoder, step, PROMPTS, sampling, stop)
    assert out.sequences == plain.sequences and out.stats.drafted > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("settings", [CHAIN, TREE, CHAIN | {"lookup": "sam", "weights": "bf16"}])
@pytest.mark.parametrize(
    "sampling",
    [None, SamplingSettings(1.0, seed=2), SamplingSettings(1.0, top_p=0.95, seed=2)],
)
def test_a_step_in_one_kernel_call_is_the_step_in_parts(
    decoders: dict[str, Decoder],
    method: str,
    settings: dict[str, Any],
    sampling: SamplingSettings | None,
) -> None:
    decoder = need(decoders, "native")
    layer = layer_of(method, BaseShape.of(LLAMA), draft_vocab=20 if settings is TREE else None)
    drafter = drafter_of(method, decoder, layer, **settings)
    assert isinstance(drafter.runner, PackedRunner)
    assert_fused_steps_are_steps_in_parts(
        decoder,
        lambda: drafter_of(method, decoder, layer, **settings),
        PROMPTS[0],
        sampling=sampling,
    )


def draft_steps(runner: Any, text: list[int], root: int, carried: torch.Tensor) -> torch.Tensor:
    """The outputs [steps, d] of drafting text[root:] one by one, all before it read with what is
    carried [T, d] of each.
    """
    if root:
        runner.step(text[:root], Rows.causal(0, 0, root), carried[:root], 0)
    out, given = [], carried[root : root + 1]
    for slot in range(root, len(text)):
        _, given = runner.step([text[slot]], Rows.causal(0, slot, 1), given, 1)
        out.append(given[0])
    return torch.stack(out)


@pytest.mark.parametrize("backend, error", [("hf", 1e-4), ("bf16", 0.05), ("int8", 0.2)])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("before", [False, True])
def test_training_computes_what_drafting_computes(
    decoders: dict[str, Decoder], method: str, backend: str, error: float, before: bool
) -> None:
    """Row t of draft step s is what s tokens drafted from t − s + 1 give."""
    if before and method == "eagle":
        pytest.skip("an option of eagle3's")
    decoder = need(decoders, "hf" if backend == "hf" else "native")
    options = {"norm_before_residual": before} if method == "eagle3" else {}
    layer = layer_of(method, BaseShape.of(LLAMA), unroll_steps=3, **options)
    weights = {} if backend == "hf" else {"weights": backend}
    runner: Any = drafter_of(method, decoder, layer, **weights).runner
    text = ids(1, 9)[0].tolist()
    cache = decoder.new_cache(1, 16)
    rows = Rows.causal(0, 0, len(text))
    embedded = decoder.embed(torch.tensor(text), rows.pos)
    last = decoder.info.num_layers
    final, taps = decoder.layers_with_taps(embedded, rows, 0, last, cache, layer.taps)
    carried = shift(runner.carried(final, taps)[None])
    if backend != "hf":
        layer = layer.float()
    steps = layer.unrolled(embedded[None], carried)
    for root in (0, 2, 6):
        runner.begin(decoder.new_cache(1, 16))
        drafted = draft_steps(runner, text[: root + 3], root, carried[0])
        wanted = torch.stack([steps[s][0, root + s] for s in range(3)])
        torch.testing.assert_close(drafted, wanted, atol=error, rtol=0.05)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_read_of_committed_tokens_is_true(
    decoders: dict[str, Decoder], method: str
) -> None:
    """The layer's own K/V of all tokens before the last draft are those of one pass over them."""
    decoder = decoders["hf"]
    layer = layer_of(method, BaseShape.of(LLAMA))
    drafter = drafter_of(method, decoder, layer, **TREE)
    runner, compared = drafter.runner, 0
    assert isinstance(runner, FeatureRunner)

    def check(session: Session, step: Step) -> None:
        nonlocal compared
        for b in session.active:
            text = session.sampler.tokens[b]
            # all but what waits for the next draft
            pending = drafter._reading.pending.get(b)
            length = session.cache.lengths[b] - (len(pending.ids) if pending else 0)
            rows = Rows.causal(0, 0, length)
            x = decoder.embed(torch.tensor(text[:length]), rows.pos)
            cache = decoder.new_cache(1, length)
            last = decoder.info.num_layers
            final, taps = decoder.layers_with_taps(x, rows, 0, last, cache, layer.taps)
            carried = shift(runner.carried(final, taps)[None])
            _, (keys, values) = layer(x[None], carried)
            own = runner._own
            assert own is not None
            for held, true in ((own.keys[0], keys), (own.values[0], values)):
                torch.testing.assert_close(held[b, :, :length], true[0], atol=1e-4, rtol=1e-3)
            compared += length > len(PROMPTS[b])

    stop = StopSettings(max_new_tokens=12)
    generate(decoder, SpeculativeStep(drafter), PROMPTS, stop=stop, after_step=check)
    assert compared > 5


@pytest.mark.parametrize("method, setting", [("eagle3", "plain")])
def test_sampling_keeps_the_distribution(method: str, setting: str) -> None:
    model, decoder = tiny(5, vocab=VOCAB)
    layer = layer_of(method, BaseShape.of(model.config))
    drafter = drafter_of(method, decoder, layer, **TREE | {"nodes": 4})
    assert p_value(sampled(SETTINGS[setting], drafter), analytic(SETTINGS[setting], 5)) > ALARM


def test_the_loss_of_eagle3_is_that_of_its_own_head_and_its_gradient_reaches_all() -> None:
    teacher = Teacher(base())
    layer = layer_of("eagle3", teacher.shape, draft_vocab=20, unroll_steps=2).requires_grad_(True)
    layer.draft_tokens.copy_(torch.arange(20) * 3)
    tokens = ids(2, 8)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :4] = False  # a prompt
    layer.tap_sizes.copy_(torch.linspace(0.5, 2, len(layer.tap_sizes)))
    objective = spec.find_training("eagle3").objective(teacher, layer)
    loss, report = objective(tokens, mask)
    loss.backward()
    found = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    assert found.keys() == {name for name, _ in layer.named_parameters()}
    assert report.result.agree.shape == (2, int(mask.sum()))

    layer.zero_grad()
    hidden = trace(teacher.parts, tokens)[0]
    read = torch.cat([hidden[tap] for tap in layer.taps], dim=-1)
    p = teacher.head.logits(teacher.norm(hidden[-1])[mask])[:, layer.draft_tokens].log_softmax(-1)
    outputs = layer.unrolled(hidden[0], shift(layer.fc(read / layer.tap_sizes)))
    kls = []
    for out in outputs:
        q = layer.head(layer.norm(out[mask])).log_softmax(-1)
        kls.append((p.exp() * (p - q)).sum(-1).mean())
    wanted = (kls[0] + 0.8 * kls[1]) / 1.8
    torch.testing.assert_close(loss, wanted, atol=1e-4, rtol=1e-4)
    wanted.backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-3)


def test_the_loss_of_eagle_is_of_features_and_distribution_and_noise_is_in_training_alone() -> None:
    teacher = Teacher(base())
    layer = layer_of("eagle", teacher.shape, draft_vocab=None)
    tokens = ids(2, 8)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :4] = False  # a prompt
    objective = spec.find_training("eagle").objective(teacher, layer)
    loss, _ = objective(tokens, mask)
    hidden = trace(teacher.parts, tokens)[0]
    (out,) = layer.unrolled(hidden[0], shift(hidden[-1]))
    feature, drafted = teacher.norm(hidden[-1])[mask], teacher.norm(out)[mask]
    p, q = (teacher.head.logits(x).log_softmax(-1) for x in (feature, drafted))
    difference = (feature - drafted).abs()
    smooth = torch.where(difference < 1, 0.5 * difference.square(), difference - 0.5).mean()
    wanted = smooth + 0.1 * (p.exp() * (p - q)).sum(-1).mean()
    torch.testing.assert_close(loss, wanted, atol=1e-4, rtol=1e-4)
    layer.train()
    noisy = [float(objective(tokens, mask)[0]) for _ in range(2)]
    assert noisy[0] == noisy[1] != pytest.approx(float(loss), rel=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_training_starts_better_than_at_random(method: str) -> None:
    teacher, training = Teacher(base()), spec.find_training(method)
    layer = training.build(training.config_for(teacher.shape), teacher.shape)
    tokens = [ids(4, 24, seed=seed) for seed in range(6)]
    mask = torch.ones_like(tokens[0], dtype=torch.bool)
    objective = training.objective(teacher, layer)
    before = [objective(t, mask)[1].loss for t in tokens]
    assert training.start is not None
    training.start(teacher, layer, [(t, mask, None) for t in tokens])
    after = [objective(t, mask)[1].loss for t in tokens]
    assert sum(after) < 0.8 * sum(before)


@pytest.mark.parametrize(
    "method, options, message",
    [
        ("eagle3", {"taps": [1, 2]}, "'taps' is .*3 layers, increasing"),
        ("eagle3", {"taps": [1, 2, 9]}, "'taps' is .*at most the base model's 4 layers"),
        ("eagle3", {"draft_vocab": 99}, "'draft_vocab' is 99; .*at most the base model's 61"),
        ("eagle3", {"kv_heads": 3}, "'kv_heads' is 3; accepted: a divisor of heads"),
        ("eagle3", {"unroll_steps": 0}, "'unroll_steps' is 0; accepted: 1 to 16"),
    ],
)
def test_refused_options(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        spec.find_training(method).config_for(BaseShape.of(LLAMA), **options)


def test_refused_settings() -> None:
    with pytest.raises(UserError, match="eagle3: 'nodes' is 64; accepted: 1 to"):
        spec.find("eagle3").read_settings({"nodes": 64})
    with pytest.raises(UserError, match="needs an accelerator trained with --method eagle3"):
        spec.find("eagle3").make_drafter(HFDecoder(model_of(LLAMA)))
