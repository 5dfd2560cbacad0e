"""Weights in 8 bits where nothing is verified: the method of its own, and the setting of those that
leave layers out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from native_kernel import skip_without_kernel

from multirate.bench import provenance
from multirate.decoding.invariants import check_invariants
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.session import Session
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.errors import Notice, UserError
from multirate.methods import spec
from multirate.methods.common.model_weights import NarrowStep
from multirate.model.hf.decoder import HFDecoder
from multirate.model.native import NativeDecoder
from multirate.model.native.decoder import narrow_weights
from multirate.model.native.packing import W4A8, W4A16, W8_BLOCK, W8A8
from multirate.model.rows import Rows

from .m2r2_models import LLAMA, PROMPTS, model_of, narrow_decoder
from .test_lossy_depth import METHODS, OFTEN, step_of

STOP = StopSettings(max_new_tokens=24)


@pytest.fixture(scope="module")
def shared() -> NativeDecoder:
    return narrow_decoder()


@pytest.fixture
def decoder(shared: NativeDecoder, monkeypatch: pytest.MonkeyPatch) -> NativeDecoder:
    """Whose narrow weights a test may replace."""
    monkeypatch.setattr(shared, "_narrow", shared.narrow())
    return shared


def int8_step(decoder: Any, margin: float) -> Any:
    return spec.find("int8_weights").make_step(decoder, None, {"margin": margin})


def plain_text(decoder: Any, **more: Any) -> list[list[int]]:
    return generate(decoder, PlainStep(), PROMPTS, stop=STOP, **more).sequences


def test_where_no_margin_is_enough_the_text_is_the_bases(decoder: NativeDecoder) -> None:
    """Every row runs again, so K/V are those of a fresh prefill, too; in a batch as alone."""
    step = int8_step(decoder, 1e9)
    for prompts in (PROMPTS, PROMPTS[:1]):
        out = generate(
            decoder,
            step,
            prompts,
            stop=STOP,
            after_step=lambda session, step: check_invariants(session, step, atol=1e-3),
        )
        assert out.sequences == plain_text(decoder)[: len(prompts)]
        assert out.stats.doubted == out.stats.tokens - len(prompts)


def test_without_a_margin_nothing_is_asked_again(decoder: NativeDecoder) -> None:
    copy = decoder.narrow()
    assert copy is not None
    step = int8_step(decoder, 0.0)
    assert not step.lossless
    out = generate(decoder, step, PROMPTS, stop=STOP)
    assert out.stats.doubted == 0
    # what decides is the copy: with one that knows nothing the text is another
    nothing = copy.owner.linear(torch.zeros_like(decoder.head_weight))
    decoder._narrow = replace(copy, head=nothing)
    blind = generate(decoder, int8_step(decoder, 0.0), PROMPTS, stop=STOP)
    assert blind.sequences != plain_text(decoder)
    # and any margin asks the model itself
    asked = generate(decoder, int8_step(decoder, 1e-6), PROMPTS, stop=STOP)
    assert asked.sequences == plain_text(decoder)
    decoder._narrow = replace(copy, layers=decoder.packed_layers, head=decoder.head)
    same = generate(decoder, int8_step(decoder, 0.0), PROMPTS, stop=STOP)
    assert same.sequences == plain_text(decoder)


def test_sampled_text_is_plain_decodings(decoder: NativeDecoder) -> None:
    sampling = SamplingSettings(0.9, seed=4)
    out = generate(decoder, int8_step(decoder, 0.0), PROMPTS, sampling, STOP)
    assert out.sequences == plain_text(decoder, sampling=sampling)


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_leave_layers_out_read_the_copy(decoder: NativeDecoder, name: str) -> None:
    copy = decoder.narrow()
    assert copy is not None
    own = generate(decoder, step_of(decoder, name, OFTEN[name]), PROMPTS, stop=STOP)
    decoder._narrow = replace(copy, layers=decoder.packed_layers, head=decoder.head)
    for weights in ("own", "int8"):
        step = step_of(decoder, name, OFTEN[name], model_weights=weights)
        assert isinstance(step, NarrowStep) == (weights == "int8")
        out = generate(decoder, step, PROMPTS, stop=STOP)
        assert out.sequences == own.sequences and out.stats.exits == own.stats.exits
    nothing = copy.owner.linear(torch.zeros_like(decoder.head_weight))
    decoder._narrow = replace(copy, head=nothing)
    step = step_of(decoder, name, None, model_weights="int8")
    assert generate(decoder, step, PROMPTS, stop=STOP).sequences != plain_text(decoder)
    # the decoder itself, which others go on with, is as it was
    assert generate(decoder, PlainStep(), PROMPTS, stop=STOP).sequences == plain_text(decoder)


def test_keys_and_values_of_the_copy_are_not_kept_for_another_prompt(
    decoder: NativeDecoder,
) -> None:
    exact: list[int] = []
    for step in (
        int8_step(decoder, 0.0),
        step_of(decoder, "calm", 0.5, model_weights="int8"),
    ):
        exact.clear()
        generate(
            decoder,
            step,
            PROMPTS[:1],
            stop=STOP,
            after_step=lambda session, step: exact.append(session.exact_length(0)),
        )
        assert set(exact) == {len(PROMPTS[0])}


def test_dials_over_the_copy_are_measured_where_there_is_one(decoder: NativeDecoder) -> None:
    for name in ("calm", "skipdecode"):
        mode = spec.find(name).dynamic
        assert mode is not None
        labels = [dial.label for dial in mode.dials(decoder, None)]
        assert labels.count("score") == labels.count("score-int8") > 0
        assert mode.dial(decoder, None).label == "score"
        settings = mode.dial(decoder, None, "score-int8").settings(None, 0.9)
        assert settings["model_weights"] == "int8"


def test_without_products_of_bytes_it_is_said() -> None:
    decoder = HFDecoder(model_of(LLAMA))
    with pytest.warns(Notice, match="method int8_weights has no effect here.*full-precision"):
        step = int8_step(decoder, 0.0)
    assert step.lossless
    assert generate(decoder, step, PROMPTS, stop=STOP).sequences == plain_text(decoder)
    with pytest.warns(Notice, match="model_weights=int8 has no effect here.*full-precision"):
        step = step_of(decoder, "calm", 0.5, model_weights="int8")
    assert not isinstance(step, NarrowStep)
    mode = spec.find("calm").dynamic
    assert mode is not None and {d.label for d in mode.dials(decoder, None)} == {"score"}


def test_what_is_refused() -> None:
    for margin in (-1, float("nan"), "wide"):
        with pytest.raises(UserError, match="margin"):
            int8_step(None, margin)
    with pytest.raises(UserError, match="'model_weights' is 'int4'; accepted: 'own', 'int8'"):
        step_of(None, "skipdecode", 0.5, model_weights="int4")  # type: ignore[arg-type]


def test_layers_of_four_bit_numbers_are_copied_in_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a model from a quantised file; the head, which is none, in eight. What the copy
    says is as near as with eight bits for all, and the model's own text where it is never believed.
    In eight, too, where the environment says so.
    """
    monkeypatch.delenv("MULTIRATE_NARROW_BITS", raising=False)
    model = model_of(LLAMA, torch.bfloat16)
    skip_without_kernel()
    with torch.no_grad():
        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                blocks = module.weight.float().unflatten(1, (-1, W8_BLOCK))
                least = blocks.amin(dim=2, keepdim=True).half().float()
                unit = ((blocks - least).amax(dim=2, keepdim=True) / 15).half().float()
                steps = ((blocks - least) / unit).round().clamp(0, 15)
                module.weight.copy_((steps * unit + least).flatten(1))
    decoder = NativeDecoder(model)
    if not narrow_weights(decoder):
        pytest.skip("this processor multiplies no bytes")
    copy = decoder.narrow()
    assert copy is not None
    for i in range(decoder.info.num_layers):
        layer = copy.layers[i]
        assert layer.qkv.format == W4A16
        assert {layer.o.format, layer.gate_up.format, layer.down.format} == {W4A8}
    assert copy.head.format == W8A8
    ids, rows = torch.tensor(PROMPTS[0]), Rows.causal(0, 0, len(PROMPTS[0]))
    logits = []
    for each in (decoder, decoder.in_8_bits()):
        cache = each.new_cache(1, len(ids))
        x = each.layers(each.embed(ids, rows.pos), rows, 0, each.info.num_layers, cache)
        logits.append(each.logits(x))
    assert (logits[1] - logits[0]).norm() < 0.05 * logits[0].norm()
    assert not torch.equal(logits[0], logits[1])
    out = generate(decoder, int8_step(decoder, 1e9), PROMPTS, stop=STOP)
    assert out.sequences == plain_text(decoder)

    monkeypatch.setenv("MULTIRATE_NARROW_BITS", "8")
    copy = NativeDecoder(model).narrow()
    assert copy is not None and copy.layers[0].down.format == W8A8
    assert provenance.collect()["environment"]["MULTIRATE_NARROW_BITS"] == "8"
    monkeypatch.setenv("MULTIRATE_NARROW_BITS", "6")
    with pytest.raises(UserError, match="MULTIRATE_NARROW_BITS is '6'; accepted: 4, 8"):
        NativeDecoder(model)


@pytest.mark.parametrize("method", ["int8_weights", "skipdecode"])
def test_prompts_that_the_narrow_copy_reads(method: str) -> None:
    """What is kept of them is as the copy reads them; the model's own reading is another."""
    decoder = narrow_decoder()
    settings = {"model_weights": "int8"} if method == "skipdecode" else {}
    for prompt_weights, reads in (("own", decoder), ("narrow", decoder.in_8_bits())):
        made = {**settings, "prompt_weights": prompt_weights}
        step = spec.find(method).make_step(decoder, None, made)
        assert step is not None
        assert (step.prompt_decoder is None) == (prompt_weights == "own")
        stored: list[torch.Tensor] = []
        count = len(PROMPTS[0])

        def keep(
            session: Session, _: Step, stored: list[torch.Tensor] = stored, count: int = count
        ) -> None:
            stored.append(session.cache.standard(1)[0][0, :, :count].clone())

        generate(decoder, step, PROMPTS[:1], stop=STOP, after_step=keep)
        cache, rows = decoder.new_cache(1, count), Rows.causal(0, 0, count)
        x = reads.embed(torch.tensor(PROMPTS[0]), rows.pos)
        reads.layers(x, rows, 0, decoder.info.num_layers, cache)
        assert torch.equal(stored[0], cache.standard(1)[0][0, :, :count])
    sampled = SamplingSettings(temperature=0.8, seed=3)
    generate(decoder, step, PROMPTS, sampled, STOP, after_step=check_invariants)
    with pytest.raises(UserError, match=r"'prompt_weights' is 'narrow'; .* model_weights=int8"):
        spec.find("skipdecode").make_step(decoder, None, {"prompt_weights": "narrow"})


@pytest.mark.parametrize("name", sorted(spec.dynamic_methods(False) + spec.dynamic_methods(True)))
def test_no_method_reads_prompts_with_a_copy_that_it_does_not_have(name: str) -> None:
    settings = spec.find(name).settings
    if settings is None or "model_weights" not in settings.__dataclass_fields__:
        pytest.skip("its prompts need no other setting")
    with pytest.raises(UserError, match=r"'prompt_weights' is 'narrow'"):
        settings.from_json({"prompt_weights": "narrow"})
