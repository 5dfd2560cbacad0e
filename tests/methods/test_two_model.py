"""Two-model speculation: tiny models with one tokenizer, and those with another."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding.invariants import check_invariants
from lab.bench import tiny_model
from native_kernel import skip_without_kernel
from tokenizers import AddedToken

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.speculate.drafter import Draft, DraftRequest
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.engine import attach
from multirate.errors import UserError
from multirate.methods.spec import SecondModel, find
from multirate.runtime.decoder import Decoder
from multirate.runtime.load import load_decoder

PROMPTS = [list(b"Once upon"), [7], list(range(40, 60))]
STOP = StopSettings(max_new_tokens=16)
SAMPLINGS = [
    None,
    SamplingSettings(1.0, seed=3),
    SamplingSettings(0.8, top_p=0.9, seed=4),
    SamplingSettings(1.0, repetition_penalty=1.3, seed=5),
]


@cache
def decoder_of(backend: str, seed: int = 0, **changes: Any) -> Decoder:
    dtype = torch.bfloat16 if backend == "native" else torch.float32
    if backend == "native":
        changes |= {"hidden_size": 128}
    network = tiny_model.model(seed, dtype, **changes)
    if backend == "native":
        skip_without_kernel()
    return load_decoder(network, backend)


def step_with(base: Decoder, draft: Decoder, **settings: Any) -> SpeculativeStep:
    words = tiny_model.tokenizer()
    drafter = find("two_model").make_drafter(
        base, SecondModel("other", draft, words, words), settings
    )
    assert drafter is not None
    return SpeculativeStep(drafter)


@pytest.mark.parametrize("backend", ["hf", "native"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_text_is_plain_decodings_whoever_drafts(
    backend: str, sampling: SamplingSettings | None
) -> None:
    """Alone and in a batch; what the base itself drafts is all accepted."""
    base = decoder_of(backend)
    plain = generate(base, PlainStep(), PROMPTS, sampling, STOP)
    for draft, settings, prompts in (
        (base, {}, PROMPTS),
        (base, {"tokens": 3}, PROMPTS[:1]),
        (decoder_of(backend, 1, num_hidden_layers=1), {"tokens": 6}, PROMPTS),
        (decoder_of(backend, 1, num_hidden_layers=1), {}, PROMPTS[:1]),
    ):
        out = generate(base, step_with(base, draft, **settings), prompts, sampling, STOP)
        assert out.sequences == plain.sequences[: len(prompts)]
        assert out.stats.drafted > 0
        if draft is base:
            assert out.stats.acceptance == 1
            assert out.stats.tokens_per_step >= 3


def test_caches_are_a_fresh_prefills_after_every_step() -> None:
    base, draft = decoder_of("hf"), decoder_of("hf", 1, num_hidden_layers=1)
    for other in (base, draft):
        step = step_with(base, other)
        generate(base, step, PROMPTS, None, STOP, after_step=check_invariants)


def test_a_draft_is_what_the_draft_model_says_after_the_verified_text() -> None:
    """However much was rejected before it: nothing of that is left in the draft model's cache."""
    base, network = decoder_of("hf"), tiny_model.model()
    with torch.no_grad():
        for parameter in network.model.layers[2].parameters():
            parameter.mul_(0.7)
    draft = load_decoder(network, "hf")
    step = step_with(base, draft)
    made: list[tuple[list[int], list[int]]] = []
    in_parts = step.drafter.draft

    def noted(request: DraftRequest) -> list[Draft]:
        drafts, texts = in_parts(request), request.sampler.tokens
        made.extend((list(texts[b]), d.tokens) for b, d in zip(request.seqs, drafts, strict=True))
        return drafts

    step.drafter.draft = noted  # type: ignore[method-assign]
    stats = generate(base, step, PROMPTS, None, STOP).stats
    assert 0.1 < stats.acceptance < 0.9
    stop = StopSettings(max_new_tokens=4)
    alone = generate(draft, PlainStep(), [text for text, _ in made], None, stop).sequences
    assert [tokens for _, tokens in made] == [
        tokens[: len(drafted)] for tokens, (_, drafted) in zip(alone, made, strict=True)
    ]


def test_a_turn_goes_on_in_both_caches(tmp_path: Path) -> None:
    folder = tiny_model.save(tmp_path)
    engine = attach(str(folder), backend="hf")
    method = f"two_model:draft={folder}"
    first = engine.generate(PROMPTS[:1], None, STOP, method=method, speculate="always")
    second = [*PROMPTS[0], *first.sequences[0], 9, 8]
    out = engine.generate([second], None, STOP, method=method, speculate="always")
    assert out.stats.resumed > len(PROMPTS[0])
    assert out.stats.acceptance == first.stats.acceptance == 1
    plain = engine.generate([second], None, STOP, method="autoregressive")
    assert out.sequences == plain.sequences


@pytest.mark.parametrize("context", [16, 30])
def test_a_shorter_context_of_the_draft_model_ends_drafts_not_the_text(context: int) -> None:
    base, draft = decoder_of("hf"), decoder_of("hf", max_position_embeddings=context)
    plain = generate(base, PlainStep(), PROMPTS, None, STOP)
    out = generate(base, step_with(base, draft), PROMPTS, None, STOP)
    assert out.sequences == plain.sequences
    assert 0 < out.stats.drafted < 3 * STOP.max_new_tokens  # type: ignore[operator]


@pytest.mark.parametrize("rows", [200, 300])
def test_rows_of_the_head_that_no_token_has_do_not_matter(rows: int) -> None:
    """Models of one family pad their vocabularies differently."""
    base, draft = decoder_of("hf"), decoder_of("hf", 2, vocab_size=rows)
    for sampling in (None, SAMPLINGS[1]):
        plain = generate(base, PlainStep(), PROMPTS, sampling, STOP)
        out = generate(base, step_with(base, draft), PROMPTS, sampling, STOP)
        assert out.sequences == plain.sequences


def test_another_tokenizer_is_refused_by_its_first_difference(tmp_path: Path) -> None:
    base, ours = decoder_of("hf"), tiny_model.tokenizer()

    def refused(theirs: Any, here: Any, message: str) -> None:
        with pytest.raises(UserError, match=message):
            find("two_model").make_drafter(base, SecondModel("other", base, theirs, here))

    more = tiny_model.tokenizer()
    more.add_tokens([AddedToken("hello")])
    refused(more, ours, "other has another tokenizer .*'hello' is number 261 there and unknown")
    refused(ours, more, "'hello' is unknown there and number 261 here")
    ends = tiny_model.tokenizer()
    ends.eos_token = "<|user|>"
    refused(ends, ours, r"its eos_token is '<\|user\|>' there and '<eos>' here")
    refused(ours, None, "both models' tokenizers, but the base model has none")
    with pytest.raises(UserError, match="two_model:draft=MODEL"):
        find("two_model").make_drafter(base)
    engine = attach(tiny_model.model(), backend="hf", tokenizer=ours)
    with pytest.raises(UserError, match="two_model:draft=MODEL"):
        engine.generate(PROMPTS[:1], method="two_model")
    with pytest.raises(UserError, match="there is no folder"):
        engine.generate(PROMPTS[:1], method=f"two_model:draft={tmp_path}/none")
