"""Prompt lookup, layerskip and the registry, on a real tiny model against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from decoding.invariants import check_invariants

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.drafter import DraftRequest
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.methods.spec import all_specs, find, parse_variant
from multirate.runtime.load import load_decoder

PROMPTS = [[3, 7, 1, 9, 3, 7, 1], [5], [2, 2, 8, 4, 2, 2, 8, 4, 2]]


@pytest.fixture(scope="module")
def tiny() -> Any:
    torch.manual_seed(3)
    config = tf.LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = tf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model, load_decoder(model, "hf")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("prompt_lookup", {}),
        ("prompt_lookup", {"max_ngram": 1, "tokens": 3}),
        ("sam", {}),
        ("sam", {"tokens": 5, "per_match": 0.5}),
        ("lookahead", {}),
        ("lookahead", {"ngram": 4, "window": 3, "guesses": 3}),
        ("layerskip", {}),
        ("layerskip", {"exit_layer": 3, "confidence": 0.0}),
        ("layerskip", {"exit_layer": 2, "confidence": 0.9}),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_greedy_is_generate(
    tiny: Any, name: str, config: dict[str, Any], batch: int, penalty: float
) -> None:
    model, decoder = tiny
    drafter = find(name).make_drafter(decoder, settings=config)
    assert drafter is not None
    out = generate(
        decoder,
        SpeculativeStep(drafter),
        PROMPTS[:batch],
        SamplingSettings(repetition_penalty=penalty),
        StopSettings(max_new_tokens=30),
        after_step=check_invariants,
    )
    for prompt, sequence in zip(PROMPTS, out.sequences, strict=False):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=30,
            do_sample=False,
            repetition_penalty=penalty,
        )
        assert sequence == expected[0, len(prompt) :].tolist()
    if (
        config.get("exit_layer") == 3
    ):  # three of four layers agree with all four often enough to be seen
        assert out.stats.accepted > 0
        assert out.stats.tokens_per_step > 1


def test_early_exit_with_all_the_information_is_always_accepted(tiny: Any) -> None:
    """Deeper layers that change nothing: every draft is accepted, so hidden states and K/V are
    handed over exactly.
    """
    model, _ = tiny
    with torch.no_grad():
        saved = [p.clone() for p in model.model.layers[2:].parameters()]
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        decoder = load_decoder(model, "hf")
        drafter = find("layerskip").make_drafter(
            decoder, settings={"exit_layer": 2, "confidence": 0.0, "tokens": 4}
        )
        assert drafter is not None
        for sampling in (SamplingSettings(), SamplingSettings(1.0, seed=1)):
            stop = StopSettings(max_new_tokens=26)
            stats = generate(decoder, SpeculativeStep(drafter), PROMPTS, sampling, stop).stats
            assert stats.acceptance == 1
            assert stats.tokens_per_step == 5
        for parameter, old in zip(model.model.layers[2:].parameters(), saved, strict=True):
            parameter.copy_(old)


def test_prompt_lookup_proposes_what_followed_last(tiny: Any) -> None:
    def draft(text: list[int], limit: int = 5, **config: int) -> list[int]:
        sampler = Sampler(SamplingSettings(), [text[:-1]])
        drafter = find("prompt_lookup").make_drafter(tiny[1], settings=config)
        drafter.begin(None, sampler)  # type: ignore[arg-type]
        drafter.draft(DraftRequest([0], [limit], sampler))
        sampler.tokens[0].append(text[-1])  # the index grows between steps
        return drafter.draft(DraftRequest([0], [limit], sampler))[0].tokens

    assert draft([1, 2, 3, 4, 5, 9, 2, 3]) == [4, 5, 9, 2, 3]
    assert draft([1, 2, 3, 4, 5, 9, 2, 3], limit=2) == [4, 5]
    assert draft([1, 2, 3, 4, 5, 9, 2, 3], tokens=1) == [4]
    assert draft([7, 1, 2, 8, 1, 2, 9, 1, 2]) == [
        9,
        1,
        2,
        9,
        1,
    ]  # the latest occurrence, and round again
    assert draft([5, 1, 2, 8, 6, 1, 2, 9, 5, 1, 2]) == [8, 6, 1, 2, 9]  # the longer match wins
    assert draft([5, 1, 2, 8, 6, 1, 2, 9, 5, 1, 2], max_ngram=2) == [9, 5, 1, 2, 9]
    assert draft([1, 2, 3, 4]) == []


def test_sam_proposes_what_followed_the_longest_end_by_its_length(tiny: Any) -> None:
    def draft(text: list[int], limit: int = 9, **config: Any) -> list[int]:
        sampler = Sampler(SamplingSettings(), [text])
        drafter = find("sam").make_drafter(tiny[1], settings=config)
        assert drafter is not None
        drafter.begin(None, sampler)  # type: ignore[arg-type]
        return drafter.draft(DraftRequest([0], [limit], sampler))[0].tokens

    text = [5, 1, 2, 3, 4, 8, 6, 7, 9, 3, 4, 10, 5, 1, 2, 3, 4]
    assert draft(text, per_match=1) == [8, 6, 7, 9, 3]  # five matched; three would give [10, …]
    assert draft(text, per_match=0.5) == [8, 6]
    assert draft(text, per_match=0.1) == [8]
    assert draft(text, limit=2) == draft(text, tokens=2) == [8, 6]
    assert draft([1, 2, 3, 4]) == []
    assert len(draft(text)) == 9


def test_registry() -> None:
    assert {"autoregressive", "prompt_lookup", "layerskip"} <= set(all_specs())
    assert all(
        m.summary and m.lossless
        for m in all_specs().values()
        if m.name in ("autoregressive", "layerskip")
    )
    with pytest.raises(
        UserError,
        match=r"'medusae' is unknown; accepted: .*autoregressive.*layerskip.*prompt_lookup",
    ):
        find("medusae")


def test_a_name_may_carry_settings() -> None:
    assert parse_variant("m2r2") == ("m2r2", {})
    assert parse_variant(
        "m2r2-carry:lookup=0:exit_score=arla:verify_threshold=null:draft_threshold=0.5"
    ) == (
        "m2r2-carry",
        {"lookup": 0, "exit_score": "arla", "verify_threshold": None, "draft_threshold": 0.5},
    )
    with pytest.raises(UserError, match="in method 'm2r2:nodes', 'nodes' is not NAME=VALUE"):
        parse_variant("m2r2:nodes")


def test_settings_refuse(tiny: Any) -> None:
    _, decoder = tiny
    assert find("autoregressive").make_drafter(decoder) is None
    for name, config, message in [
        ("layerskip", {"exit_layer": 4}, r"exit_layer is 4; accepted for this model: 1\.\.3"),
        ("layerskip", {"exit": 1}, "no setting 'exit'; accepted: exit_layer"),
        ("layerskip", {"confidence": 2}, "'confidence' is 2"),
        ("layerskip", [1], "mapping of exit_layer"),
        ("prompt_lookup", {"tokens": 0}, "'tokens' is 0"),
        ("lookahead", {"ngram": 1}, "'ngram' is 1"),
        ("lookahead", {"ngram": 9, "window": 5}, "'window' is 5; accepted: at least .*7"),
        ("lookahead", {"window": 40}, "'window' is 40; accepted: such that"),
        ("sam", {"per_match": 0}, "'per_match' is 0"),
        ("autoregressive", {"x": 1}, "has no settings"),
    ]:
        with pytest.raises(UserError, match=message):
            find(name).make_drafter(decoder, settings=config)
