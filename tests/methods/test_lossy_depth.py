"""What every method that leaves layers out without verification must do, asked of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from decoding.invariants import check_invariants
from native_kernel import skip_without_kernel

from multirate.decoding.depth import Leaving
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.session import Session
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.engine import attach
from multirate.errors import UserError
from multirate.lab.calibration.calibrate import Calibration
from multirate.lab.calibration.risk import samples_needed
from multirate.methods import spec
from multirate.methods._shared.shape import BaseShape
from multirate.methods.spec import MethodSpec
from multirate.runtime.decoder import Decoder
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.native import NativeDecoder
from multirate.runtime.rows import Rows
from multirate.training.checkpoint import Accelerator

from .m2r2_models import LLAMA, PROMPTS, model_of
from .tiny import disturb

LAYERS = LLAMA.num_hidden_layers
METHODS = [name for name, known in spec.all_specs().items() if known.role == "depth"]
SCORED = [name for name in METHODS if name not in ("skipdecode", "mixture_of_depths")]
PROPAGATED = [name for name in SCORED if name not in ("deed", "free")]
STOP = StopSettings(max_new_tokens=24)
OFTEN = {
    "calm": 0.02,
    "calm-classifier": 0.5,
    "deed": 0.06,
    "free": 0.05,
    "lite": 0.06,
    "mixture_of_depths": 0.5,
    "skipdecode": 0.3,
    "specee": 0.0,
}
"""Dials with which some tokens of the tiny model leave early."""
FIXED: dict[str, dict[str, Any]] = {"calm": {"exits": [1, 2, 3]}}
TRAINED: dict[str, dict[str, Any]] = {
    "free": {"exits": [2]},
    "mixture_of_depths": {"blocks": [1, 3]},
}
"""Options of training where they are not exits after every layer."""


def module_of(method: MethodSpec, **options: Any) -> Any:
    """A disturbed module, most with exits after every layer; None for methods without training."""
    if method.training is None:
        return None
    base = BaseShape.of(LLAMA)
    torch.manual_seed(7)
    given = {**TRAINED.get(method.name, {"exits": [1, 2, 3]}), **options}
    config = method.training.config_for(base, **given)
    module = method.training.build(config, base)
    disturb(module, 0.1)
    return module.eval().requires_grad_(False)


def step_of(decoder: Decoder, name: str, threshold: float | None, **settings: Any) -> Any:
    method = spec.find(name)
    module = module_of(method)
    assert method.dynamic is not None
    chosen = {**method.dynamic.settings(module, threshold), **FIXED.get(name, {}), **settings}
    step = method.make_step(decoder, module, chosen)
    return step


@pytest.fixture(scope="module")
def decoders() -> dict[str, Decoder]:
    made: dict[str, Decoder] = {"hf": HFDecoder(model_of(LLAMA))}
    low = model_of(LLAMA, torch.bfloat16)
    if NativeDecoder.supports(low) is None:
        made["native"] = NativeDecoder(low)
    return made


@pytest.fixture(params=["hf", "native"])
def decoder(decoders: dict[str, Decoder], request: pytest.FixtureRequest) -> Decoder:
    if request.param not in decoders:
        skip_without_kernel()
    return decoders[request.param]


def test_there_are_such_methods_and_all_are_marked_lossy() -> None:
    assert {
        "calm",
        "calm-classifier",
        "deed",
        "free",
        "lite",
        "mixture_of_depths",
        "skipdecode",
        "specee",
    } <= set(METHODS)
    engine = attach(model_of(LLAMA), backend="hf")
    for name in METHODS:
        method = spec.find(name)
        assert not method.lossless and method.dynamic is not None
        path = method.dynamic.path
        assert list(path) == sorted(path, reverse=True), "from the most cautious on"
        with pytest.raises(UserError, match="does not draft"):
            method.make_drafter(engine.decoder)
        if method.training is None:
            assert name in engine.methods() and not engine.lossless(name)


@pytest.mark.parametrize("sampling", [SamplingSettings(), SamplingSettings(0.9, seed=4)])
@pytest.mark.parametrize("name", METHODS)
def test_what_never_leaves_says_the_models_own_text(
    decoder: Decoder, name: str, sampling: SamplingSettings
) -> None:
    plain = generate(decoder, PlainStep(), PROMPTS, sampling, STOP)
    for threshold in [None] if name == "skipdecode" else [None, 1.0]:
        step = step_of(decoder, name, threshold)
        out = generate(decoder, step, PROMPTS, sampling, STOP)
        assert out.sequences == plain.sequences
        assert out.stats.exits == {LAYERS: out.stats.tokens - len(PROMPTS)}
        assert not step.lossless, "what a threshold lets pass is not known beforehand"


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_a_batch_are_as_if_alone_and_leave_no_holes(decoder: Decoder, name: str) -> None:
    """Some leave early, each at its own layer; K/V are there wherever a later token looks."""
    step = step_of(decoder, name, OFTEN[name])

    def check(session: Session, step: Step) -> None:
        if session.stats.target_passes % 6 == 0 or not session.active:
            atol = 1e-4 if isinstance(decoder, HFDecoder) else 0.0
            check_invariants(session, step, atol=atol)

    together = generate(decoder, step, PROMPTS, stop=STOP, after_step=check)
    apart = [generate(decoder, step, [prompt], stop=STOP) for prompt in PROMPTS]
    assert together.sequences == [out.sequences[0] for out in apart]
    assert len(together.stats.exits) > 1 and min(together.stats.exits) < LAYERS
    for layers, count in together.stats.exits.items():
        assert count == sum(out.stats.exits.get(layers, 0) for out in apart)


@pytest.mark.parametrize("name", PROPAGATED)
def test_propagated_kv_come_from_the_residual_that_the_token_itself_left_with(
    decoder: Decoder, name: str
) -> None:
    """Not from the first exit that some token left at, as public code has it."""
    step = step_of(decoder, name, OFTEN[name])
    left: list[tuple[int, int, torch.Tensor]] = []
    told = step.policy.leave

    def leave(exit: int, hidden: torch.Tensor, seqs: Sequence[int]) -> Leaving:
        said: Leaving = told(exit, hidden, seqs)
        for b, leaves, row in zip(seqs, said.rows, hidden, strict=True):
            if leaves:
                left.append((b, exit, row.clone()))
        return said

    step.policy.leave = leave
    compared = 0

    def check(session: Session, step: Step) -> None:
        nonlocal compared
        for b, exit, residual in left:
            slot = session.cache.lengths[b] - 1
            fresh = decoder.new_cache(1, slot + 1)
            decoder.fill_kv(Rows.causal(0, slot, 1), residual[None], exit, LAYERS, fresh)
            for layer in range(exit, LAYERS):
                pairs = zip(session.cache.standard(layer), fresh.standard(layer), strict=True)
                for ours, theirs in pairs:
                    torch.testing.assert_close(ours[b, :, slot], theirs[0, :, slot])
                    compared += 1
        left.clear()

    out = generate(decoder, step, PROMPTS, stop=STOP, after_step=check)
    early = set(out.stats.exits) - {LAYERS}
    assert len(early) >= min(2, len(step.policy.exits)) and compared > 20


@pytest.mark.parametrize("name", METHODS)
def test_a_text_ends_at_an_end_token_that_left_early(decoder: Decoder, name: str) -> None:
    step = step_of(decoder, name, OFTEN[name])
    ends: dict[int, int] = {}  # place in the text → layers of the token there
    before: dict[int, int] = {}

    def note(session: Session, step: Step) -> None:
        exits = session.stats.exits
        (taken,) = [layers for layers in exits if exits[layers] != before.get(layers, 0)]
        ends[len(session.stops.new_tokens[0]) - 1] = taken
        before.update(exits)

    for which in range(len(PROMPTS)):
        ends.clear()
        before.clear()
        alone = [PROMPTS[which]]
        text = generate(decoder, step, alone, stop=STOP, after_step=note).sequences[0]
        places = [
            place
            for place, layers in ends.items()
            if layers < LAYERS and text[place] not in text[:place]
        ]
        if places:
            break
    assert places
    stop = StopSettings(max_new_tokens=24, eos_token_ids=(text[places[-1]],))
    out = generate(decoder, step, PROMPTS, stop=stop, after_step=check_invariants)
    assert out.finish_reasons[which] == "eos"
    assert out.sequences[which] == text[: places[-1] + 1]


@pytest.mark.parametrize("name", [n for n in SCORED if n not in ("calm", "specee")])
def test_a_reduced_head_says_its_own_tokens_at_exits(decoder: Decoder, name: str) -> None:
    method = spec.find(name)
    module = module_of(method, draft_vocab=30)
    module.draft_tokens.copy_(torch.arange(1, 61, 2))
    assert method.dynamic is not None
    step = method.make_step(decoder, module, method.dynamic.settings(module, 0.0))
    out = generate(decoder, step, PROMPTS, stop=STOP)  # type: ignore[arg-type]
    assert out.stats.exits == {step.policy.exits[0]: out.stats.tokens - len(PROMPTS)}
    assert all(token % 2 == 1 for tokens in out.sequences for token in tokens[1:])


def test_a_quality_is_refused_where_no_calibration_can_be_kept() -> None:
    engine = attach(model_of(LLAMA), backend="hf")
    stop = engine.stopping(8)
    plain = engine.generate(PROMPTS[:1], stop=stop)
    for name in ("calm", "skipdecode"):
        with pytest.raises(UserError, match=f"method {name} needs no training"):
            engine.generate(PROMPTS[:1], stop=stop, method=f"{name}:quality=0.9")
        out = engine.generate(PROMPTS[:1], stop=stop, method=name, mode="dynamic", quality=1)
        assert out.sequences == plain.sequences


def test_what_is_lossy_is_said() -> None:
    engine = attach(model_of(LLAMA), backend="hf")
    stop = engine.stopping(4)
    engine.generate(PROMPTS[:1], stop=stop, method="calm:threshold=0.5")
    assert engine.notice == "calm:threshold=0.5 is lossy: its text may differ from the model's own"
    for name in ("autoregressive", "calm:quality=1"):
        engine.generate(PROMPTS[:1], stop=stop, method=name)
        assert engine.notice is None


def test_calibration_finds_a_threshold_that_keeps_the_quality(
    decoders: dict[str, Decoder],
) -> None:
    module = module_of(spec.find("lite"))
    accelerator = Accelerator("lite", module.config, module, {})
    prompts = [[3 + i, 5, 7 + i] for i in range(9)]
    stop = StopSettings(max_new_tokens=3)
    calibration = Calibration(decoders["hf"], accelerator, prompts, "base", stop, batch=9)
    made = calibration.reach(0.7, 0.9)
    assert made.gates == (1, 2, 3)
    assert samples_needed(0.3, 0.9) <= made.samples <= 9  # it looks no further than it must
    assert made.tried and made.loss <= 0.3
    step = spec.find("lite").make_step(decoders["hf"], accelerator, made.settings)
    out = generate(decoders["hf"], step, prompts, stop=stop)  # type: ignore[arg-type]
    assert made.leaves_early or set(out.stats.exits) == {LAYERS}


@pytest.mark.parametrize("name", ["deed", "free", "lite"])
def test_the_kernels_exits_are_the_modules(decoders: dict[str, Decoder], name: str) -> None:
    if "native" not in decoders:
        skip_without_kernel()
    step = step_of(decoders["native"], name, 0.5)
    hidden = 3 * torch.randn(3, LLAMA.hidden_size, generator=torch.Generator().manual_seed(2))
    for exit in step.policy.exits:
        expected = module_of(spec.find(name))(exit, hidden)
        given = step.policy.read(exit, hidden)
        torch.testing.assert_close(given, expected, rtol=0.02, atol=0.02)
        assert not torch.allclose(given, hidden, atol=0.1)
