"""M2R2's dynamic mode: exact K/V whatever leaves, each token where its gate's score passes, and the
base's own text where none does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from native_kernel import skip_without_kernel

from multirate import errors
from multirate.decoding import draft_length
from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.decoding.invariants import check_invariants
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.prefix_cache import PrefixCache
from multirate.decoding.results import GenerationOutput
from multirate.decoding.session import Session
from multirate.decoding.speculative import SpeculativeStep
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.errors import Notice, UserError
from multirate.hub import load_model, reference_accelerators
from multirate.methods.common import fused_steps, stream_drafter
from multirate.methods.common.teacher import Teacher
from multirate.methods.m2r2.decode import M2R2Drafter
from multirate.methods.m2r2.decode_config import CarryDecodeConfig, M2R2DecodeConfig
from multirate.methods.m2r2.exits import step_of
from multirate.methods.m2r2.modules import AcceleratedStream
from multirate.methods.m2r2.native_runner import NativeStreamRunner
from multirate.methods.m2r2.runner import StreamRunner
from multirate.methods.m2r2.train import M2R2Objective
from multirate.model.decoder import Decoder
from multirate.model.hf.decoder import HFDecoder
from multirate.model.native import NativeDecoder
from multirate.model.native.decoder import narrow_weights
from multirate.model.rows import Rows
from multirate.training.checkpoint import Accelerator

from .fused_steps import assert_fused_steps_are_steps_in_parts
from .m2r2_models import LLAMA, PROMPTS, model_of, stream_of

LAYERS = LLAMA.num_hidden_layers
STOP = StopSettings(max_new_tokens=24)
SAMPLINGS = {
    "greedy": SamplingSettings(),
    "penalty": SamplingSettings(repetition_penalty=1.3),
    "sampled": SamplingSettings(temperature=0.9, top_k=20, seed=5),
}
NEVER = 2.0  # no score is as large


@pytest.fixture(scope="module")
def decoders() -> dict[str, Decoder]:
    made: dict[str, Decoder] = {"hf": HFDecoder(model_of(LLAMA))}
    low = model_of(LLAMA, torch.bfloat16)
    if NativeDecoder.supports(low) is None:
        made["native"] = NativeDecoder(low)
    return made


def of(decoders: dict[str, Decoder], backend: str) -> Decoder:
    if backend not in decoders:
        skip_without_kernel()
    return decoders[backend]


def carry(**options: Any) -> AcceleratedStream:
    return stream_of(LLAMA, "m2r2-carry", rank=8, **options)


def gates(**options: Any) -> AcceleratedStream:
    return stream_of(LLAMA, "m2r2", rank=8, gates=(1, 2, 3), **options)


def middle_score(decoder: Decoder, stream: AcceleratedStream, count: int) -> list[float]:
    """A threshold that about half of the tokens pass, for each gate."""
    return [float(stream.arla.out.bias.detach().sigmoid())] * count  # type: ignore[union-attr]


def run(
    decoder: Decoder,
    stream: AcceleratedStream,
    prompts: list[list[int]] = PROMPTS,
    sampling: SamplingSettings | None = None,
    stop: StopSettings = STOP,
    check: Any = None,
    **settings: Any,
) -> GenerationOutput:
    config = M2R2DecodeConfig(**{"exit_score": "arla", **settings})
    return generate(
        decoder, step_of(decoder, stream, config), prompts, sampling, stop, after_step=check
    )


@pytest.mark.parametrize("backend", ["hf", "native"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("way", ["one", "several"])
def test_where_no_score_passes_the_text_is_the_bases(
    decoders: dict[str, Decoder], backend: str, sampling: str, way: str
) -> None:
    decoder, chosen = of(decoders, backend), SAMPLINGS[sampling]
    stream, count = (carry(), 1) if way == "one" else (gates(), 3)
    out = run(decoder, stream, sampling=chosen, exit_thresholds=[NEVER] * count)
    assert set(out.stats.exits) - {1} == {LAYERS} and not out.stats.exits.get(1)
    if way == "one" and chosen.temperature:
        # speculation draws its random numbers in another order than plain decoding
        plain = run(decoder, stream, sampling=chosen, draft_threshold=0.3, verify_threshold=0.1)
    else:
        plain = generate(decoder, PlainStep(), PROMPTS, chosen, STOP)
    assert out.sequences == plain.sequences


def test_without_thresholds_a_step_is_the_lossless_one(decoders: dict[str, Decoder]) -> None:
    decoder = decoders["hf"]
    for stream, count in ((carry(), 1), (gates(), 3)):
        step = step_of(decoder, stream, M2R2DecodeConfig(exit_thresholds=[None] * count))  # type: ignore[arg-type]
        assert isinstance(step, SpeculativeStep) and step.lossless
        lossy = step_of(decoder, stream, M2R2DecodeConfig(exit_thresholds=[0.5] * count))  # type: ignore[arg-type]
        assert not lossy.lossless
        assert lossy.costs(decoder) is None and not lossy.adapt(decoder, True), "nothing is timed"


@pytest.mark.parametrize("backend", ["hf", "native"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("share", ["all", "some"])
@pytest.mark.parametrize("way", ["one", "deferred", "propagate"])
def test_kv_are_complete_after_every_step(
    decoders: dict[str, Decoder], backend: str, sampling: str, share: str, way: str
) -> None:
    """Those of a fresh prefill where they are deferred, written everywhere where propagated."""
    decoder = of(decoders, backend)
    stream, count = (carry(), 1) if way == "one" else (gates(), 3)
    low = [0.0] * count if share == "all" else middle_score(decoder, stream, count)
    inexact, steps = False, 0

    def check(session: Session, step: Step) -> None:
        nonlocal inexact, steps
        steps += 1
        if steps % 3 == 0 or not session.active:
            check_invariants(session, step, atol=1e-3)
        for b in range(len(PROMPTS)):
            inexact |= session.exact_length(b) < session.cache.lengths[b]
            assert way != "one" or not step.holes(b)
        if way == "deferred" and not session.active:
            assert isinstance(step, DynamicDepthStep)
            step.flush(session)
            check_invariants(session, atol=1e-3)

    out = run(
        decoder,
        stream,
        sampling=SAMPLINGS[sampling],
        check=check,
        exit_thresholds=low,
        kv="propagate" if way == "propagate" else "deferred",
    )
    assert inexact == (way == "propagate")
    assert [len(tokens) for tokens in out.sequences] == [24] * len(PROMPTS)
    early = sum(tokens for layers, tokens in out.stats.exits.items() if layers < LAYERS)
    late = out.stats.exits.get(LAYERS, 0)
    assert early > 0 and early + late == out.stats.tokens - len(PROMPTS)
    assert late > 0 or (share == "all" and way != "one")


@pytest.mark.parametrize("way", ["one", "several"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_text_does_not_depend_on_the_rest_of_the_batch(
    decoders: dict[str, Decoder], way: str, sampling: str
) -> None:
    decoder = decoders["hf"]
    stream, count = (carry(), 1) if way == "one" else (gates(), 3)
    settings = {
        "exit_thresholds": middle_score(decoder, stream, count),
        "exit_score": "arla",
        "lookup": 4,
    }
    chosen = SAMPLINGS[sampling]
    together = run(decoder, stream, sampling=chosen, **settings)
    assert len([n for n in together.stats.exits.values() if n]) > 1
    alone = run(decoder, stream, PROMPTS[:1], sampling=chosen, **settings)
    assert together.sequences[0] == alone.sequences[0]
    if chosen.greedy:
        apart = [run(decoder, stream, [p], sampling=chosen, **settings) for p in PROMPTS]
        assert together.sequences == [out.sequences[0] for out in apart]


def test_a_text_does_not_depend_on_the_generations_before(decoders: dict[str, Decoder]) -> None:
    decoder, stream = decoders["hf"], carry()
    settings = M2R2DecodeConfig(
        exit_thresholds=middle_score(decoder, stream, 1),  # type: ignore[arg-type]
        lookup=4,
    )
    step = step_of(decoder, stream, settings)
    first = [generate(decoder, step, [p], stop=STOP).sequences for p in PROMPTS]
    assert first[::-1] == [generate(decoder, step, [p], stop=STOP).sequences for p in PROMPTS[::-1]]


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("draft_vocab", [None, 20])
@pytest.mark.parametrize("reinitialise, fuse", [(True, False), (False, False), (True, True)])
def test_tokens_that_leave_are_what_training_taught_their_gate(
    decoders: dict[str, Decoder], at: int, draft_vocab: int | None, reinitialise: bool, fuse: bool
) -> None:
    """With exact K/V the stream at a gate is the training pass's over the same text."""
    stream = gates(draft_vocab=draft_vocab, reinitialise=reinitialise, fuse=fuse)
    thresholds = [None] * (at - 1) + [0.0] * (4 - at)
    out = run(decoders["hf"], stream, exit_thresholds=thresholds)
    assert out.stats.exits == {at: out.stats.tokens - len(PROMPTS)}
    model = model_of(LLAMA)
    teacher = Teacher(model)
    objective = M2R2Objective(teacher, stream)
    for prompt, tokens in zip(PROMPTS, out.sequences, strict=True):
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            outputs, _ = objective.first_step(objective.slow(ids))
            logits = model.lm_head(teacher.norm(outputs[at - 1]))[0, len(prompt) : -1]
        if draft_vocab is not None:
            logits = logits[:, :draft_vocab]
        assert logits.argmax(-1).tolist() == tokens[1:]


@pytest.mark.parametrize("score", ["arla", "confidence"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("way", ["one", "several"])
def test_the_threshold_decides(
    decoders: dict[str, Decoder], score: str, sampling: str, way: str
) -> None:
    """The higher it is, the fewer tokens leave; at 0 all do that may."""
    stream, count = (carry(), 1) if way == "one" else (gates(), 3)
    early = []
    levels = [0.0, *(middle_score(decoders["hf"], stream, 1)), NEVER]
    if score == "confidence":
        levels[1:2] = [0.1, 0.15, 0.2, 0.3]  # around a random model's
    for threshold in levels:
        out = run(
            decoders["hf"],
            stream,
            sampling=SAMPLINGS[sampling],
            exit_thresholds=[threshold] * count,
            exit_score=score,
        )
        early.append(sum(n for layers, n in out.stats.exits.items() if layers < LAYERS))
    most = out.stats.tokens - len(PROMPTS)
    assert early == sorted(early, reverse=True) and early[-1] == 0
    assert any(0 < some < early[0] for some in early)
    assert early[0] == most if way == "several" else early[0] >= most // 2


@pytest.mark.parametrize(
    ("way", "batch", "backend"),
    [
        ("one", 1, "hf"),
        ("one", 3, "hf"),
        ("several", 1, "hf"),
        ("several", 3, "hf"),
        ("one", 1, "native"),  # steps are fused
    ],
)
def test_text_ends_at_an_early_exit(
    decoders: dict[str, Decoder], way: str, batch: int, backend: str
) -> None:
    decoder, prompts = of(decoders, backend), PROMPTS[:batch]
    stream, count = (carry(), 1) if way == "one" else (gates(), 3)
    settings = {"exit_thresholds": [0.0] * count, "kv": "deferred"}
    whole = run(decoder, stream, prompts, **settings).sequences

    def check(session: Session, step: Step) -> None:
        check_invariants(session, step, atol=1e-3 if backend == "native" else 1e-4)

    for place in (1, 4, 9):
        end = whole[0][place]
        expected = [
            tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in whole
        ]
        by_token = run(
            decoder, stream, prompts, stop=StopSettings(24, (end,)), check=check, **settings
        )
        assert by_token.sequences == expected
        reasons = ["eos" if end in tokens else "length" for tokens in whole]
        assert by_token.finish_reasons == reasons
        text = StopSettings(
            24, stop_strings=(f"<{end}>",), decode=lambda ids: "".join(f"<{i}>" for i in ids)
        )
        streamed: dict[int, list[int]] = {b: [] for b in range(batch)}
        step = step_of(decoder, stream, M2R2DecodeConfig(**settings))  # type: ignore[arg-type]
        by_text = generate(
            decoder,
            step,
            prompts,
            stop=text,
            on_tokens=lambda b, new, streamed=streamed: streamed[b].extend(new),  # type: ignore[misc]
        )
        assert by_text.sequences == [streamed[b] for b in range(batch)] == expected
    for most in (1, 2, 3, 9, 10):
        short = run(decoder, stream, prompts, stop=StopSettings(most), check=check, **settings)
        assert short.sequences[0][: most - 1] == whole[0][: most - 1]
        assert [len(tokens) for tokens in short.sequences] == [most] * batch


@pytest.mark.parametrize(("way", "backend"), [("one", "hf"), ("several", "hf"), ("one", "native")])
def test_a_conversation_goes_on_in_the_kept_cache(
    decoders: dict[str, Decoder], way: str, backend: str
) -> None:
    decoder = of(decoders, backend)
    stream, count = (carry(), 1) if way == "one" else (gates(), 3)
    settings = M2R2DecodeConfig(
        exit_thresholds=middle_score(decoder, stream, count),  # type: ignore[arg-type]
        exit_score="arla",
    )
    step, kept = step_of(decoder, stream, settings), PrefixCache()
    prompt = PROMPTS[0] * 3
    first = generate(decoder, step, [prompt], stop=STOP, prefix_cache=kept).sequences[0]
    following = [*prompt, *first, 5, 6]
    again = generate(decoder, step, [following], stop=STOP, prefix_cache=kept)
    assert again.stats.resumed >= len(prompt)
    fresh = generate(decoder, step_of(decoder, stream, settings), [following], stop=STOP)
    assert again.sequences == fresh.sequences


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("lookup", [0, 4])
@pytest.mark.parametrize("score", ["arla", "confidence"])
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.2, 0.5, NEVER])
def test_fused_steps_are_steps_in_parts(
    decoders: dict[str, Decoder], threshold: float, score: str, lookup: int, seed: int
) -> None:
    """Same drafts, tokens and exits, step by step, and the same K/V to the bit."""
    decoder = of(decoders, "native")
    stream = carry(seed=seed, draft_vocab=None if seed else 20)
    if score == "arla":
        threshold = {0.1: 0.48, 0.2: 0.5, 0.5: 0.52}.get(threshold, threshold)
    settings = M2R2DecodeConfig(
        exit_thresholds=[threshold],  # type: ignore[arg-type]
        exit_score=score,  # type: ignore[arg-type]
        width=1 + seed,
        lookup=lookup,
        depth=4,
        nodes=7,
        trusted=9,
    )
    assert_fused_steps_are_steps_in_parts(
        decoder, lambda: M2R2Drafter(decoder, stream, settings), PROMPTS[seed], new_tokens=40
    )


@pytest.mark.parametrize("gate", [1, 2])  # at 2 the text's rows run two layers before the others'
def test_streams_and_texts_draft_in_one_step(
    decoders: dict[str, Decoder], gate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some sequences of a batch copy what their text said before; the stream drafts the others'."""
    decoder, stream, kinds = of(decoders, "native"), carry(gates=(gate,)), set()
    whole = stream_drafter.run_together

    def note(every: Sequence[Any], growths: Sequence[Any]) -> Any:
        kinds.add(frozenset(growth.stream for growth in growths))
        return whole(every, growths)

    monkeypatch.setattr(stream_drafter, "run_together", note)
    settings = M2R2DecodeConfig(
        exit_thresholds=middle_score(decoder, stream, 1),  # type: ignore[arg-type]
        exit_score="arla",
        lookup=4,
    )
    repeats = (PROMPTS[0] * 6)[:40]
    assert_fused_steps_are_steps_in_parts(
        decoder, lambda: M2R2Drafter(decoder, stream, settings), repeats, new_tokens=60
    )
    assert frozenset({True, False}) in kinds


def test_a_threshold_above_every_score_is_the_lossless_step(decoders: dict[str, Decoder]) -> None:
    """Drafts, tokens and K/V, bit for bit, where both draft by the same thresholds."""
    decoder, stream = of(decoders, "native"), carry()
    seen = []
    for thresholds in (None, [NEVER]):
        settings = M2R2DecodeConfig(
            exit_thresholds=thresholds,  # type: ignore[arg-type]
            draft_threshold=0.1,
            verify_threshold=0.05,
            lookup=4,
        )
        drafter, drafts = M2R2Drafter(decoder, stream, settings), []
        fused = drafter.fused_steps

        def note(*given: Any, fused: Any = fused, drafts: list[Any] = drafts) -> Any:
            drafts.append(fused(*given))
            return drafts[-1]

        drafter.fused_steps = note  # type: ignore[method-assign]
        stored: list[torch.Tensor] = []

        def after(session: Session, step: Step, stored: list[torch.Tensor] = stored) -> None:
            stored[:] = [
                part[:, :, : session.cache.lengths[0]].clone()
                for layer in range(LAYERS)
                for part in session.cache.standard(layer)
            ]

        out = generate(decoder, SpeculativeStep(drafter), [PROMPTS[0]], stop=STOP, after_step=after)
        assert None not in drafts
        seen.append((out.sequences, drafts, stored))
    assert seen[0][:2] == seen[1][:2]
    assert all(torch.equal(a, b) for a, b in zip(seen[0][2], seen[1][2], strict=True))


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.1])
def test_kv_are_exact_after_every_fused_step(
    decoders: dict[str, Decoder], threshold: float
) -> None:
    decoder, early = of(decoders, "native"), 0
    for prompt in PROMPTS:
        out = run(
            decoder,
            carry(),
            [prompt],
            check=lambda session, step: check_invariants(session, step, atol=1e-3),
            exit_thresholds=[threshold],
            exit_score="confidence",
            lookup=3,
        )
        early += out.stats.exits.get(1, 0)
    assert early > 0


def with_margin(
    decoder: Decoder, margin: float, prompts: list[list[int]] = PROMPTS[:1], **more: Any
) -> GenerationOutput:
    """Greedy answers of the lossless preset's settings, verified with 8-bit weights first."""
    if not narrow_weights(decoder):
        pytest.skip("this processor multiplies no bytes")
    return run(decoder, carry(), prompts, margin=margin, lookup=3, **more)


def plain_text(decoder: Decoder, prompts: list[list[int]], **more: Any) -> list[list[int]]:
    return generate(decoder, PlainStep(), prompts, stop=STOP, **more).sequences


@pytest.mark.parametrize("taps", [(), (2, 3)])
def test_where_no_margin_is_enough_the_text_is_the_bases(
    decoders: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch, taps: tuple[int, ...]
) -> None:
    """Every row that is reached runs again, so K/V are those of a fresh prefill, too, though nobody
    counts on it.
    """
    monkeypatch.setattr(Session, "note_narrow", lambda *_: None)
    decoder = of(decoders, "native")
    if not narrow_weights(decoder):
        pytest.skip("this processor multiplies no bytes")
    for prompt in PROMPTS:
        out = run(
            decoder,
            carry(taps=taps),
            [prompt],
            check=lambda session, step: check_invariants(session, step, atol=1e-3),
            margin=1e9,
            lookup=3,
        )
        assert out.sequences == plain_text(decoder, [prompt])


def test_a_narrow_copy_that_knows_nothing_is_never_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its logits are all the same, so that any margin above 0 asks the model itself."""
    decoder = NativeDecoder(model_of(LLAMA, torch.bfloat16))
    if not narrow_weights(decoder):
        pytest.skip("this processor multiplies no bytes")
    copy = decoder.narrow()
    assert copy is not None
    nothing = copy.owner.linear(torch.zeros_like(decoder.head_weight))
    monkeypatch.setattr(decoder, "_narrow", replace(copy, told=nothing, exact=None))
    expected = plain_text(decoder, PROMPTS[:1])
    assert with_margin(decoder, 1e-6).sequences == expected
    assert with_margin(decoder, 0.0).sequences != expected


def test_a_narrow_copy_that_is_the_model_needs_no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = NativeDecoder(model_of(LLAMA, torch.bfloat16))
    if not narrow_weights(decoder):
        pytest.skip("this processor multiplies no bytes")
    copy = decoder.narrow()
    assert copy is not None
    same = replace(copy, layers=decoder.packed_layers, told=decoder.head, exact=None)
    monkeypatch.setattr(decoder, "_narrow", same)
    assert with_margin(decoder, 0.0).sequences == plain_text(decoder, PROMPTS[:1])


def test_only_rows_in_doubt_run_again(decoders: dict[str, Decoder]) -> None:
    decoder = of(decoders, "native")
    if not narrow_weights(decoder):
        pytest.skip("this processor multiplies no bytes")
    again = {}
    for margin in (0.0, 0.3, 1e9):
        settings = M2R2DecodeConfig(margin=margin, lookup=3)
        drafter, counts, emitted = M2R2Drafter(decoder, carry(), settings), [], []
        assert not drafter.lossless and drafter.refused is None
        fused = drafter.fused_steps

        def note(*given: Any) -> Any:
            done = fused(*given)  # noqa: B023
            counts.extend(step.doubted for step in done[0])  # noqa: B023
            emitted.extend(len(step.tokens) for step in done[0])  # noqa: B023
            return done

        drafter.fused_steps = note  # type: ignore[method-assign]
        generate(decoder, SpeculativeStep(drafter), [PROMPTS[0]], stop=STOP)
        assert all(count >= tokens for count, tokens in zip(counts, emitted, strict=True)) or (
            margin < 1e9
        )
        again[margin] = sum(counts)
    assert 0 == again[0.0] < again[0.3] < again[1e9]


@pytest.mark.parametrize("lookup", [0, 3, "sam"])
@pytest.mark.parametrize(
    "more",
    [
        {"margin": 0.3},
        {"margin": 0.0, "exit_thresholds": [0.03], "exit_score": "confidence", "trusted": 1},
    ],
)
@pytest.mark.parametrize("own_layer", [True, False])
def test_several_steps_in_a_call_are_steps_one_by_one(
    decoders: dict[str, Decoder],
    monkeypatch: pytest.MonkeyPatch,
    lookup: Any,
    more: dict[str, Any],
    own_layer: bool,
) -> None:
    """Tokens, K/V to the bit and all counts, where drafts go by fixed thresholds."""
    decoder, calls, seen = of(decoders, "native"), [0], []
    if not narrow_weights(decoder):
        pytest.skip("this processor multiplies no bytes")
    config = M2R2DecodeConfig(
        lookup=lookup, draft_threshold=0.02, verify_threshold=0.01, depth=2, nodes=2, **more
    )
    stop = StopSettings(max_new_tokens=60)
    stream = carry() if own_layer else stream_of(LLAMA, "m2r2", rank=8, gates=(1,))
    for most in (1, 8):
        monkeypatch.setattr(stream_drafter, "_MOST_AT_ONCE", most)
        monkeypatch.setattr(stream_drafter, "_LEARNED_FROM", 1)
        drafter, calls[0], stored = M2R2Drafter(decoder, stream, config), 0, []
        fused = drafter.fused_steps

        def note(*given: Any, fused: Any = fused) -> Any:
            calls[0] += 1
            return fused(*given)

        def keep(session: Session, step: Step, stored: list[torch.Tensor] = stored) -> None:
            length = session.cache.lengths[0]
            stored[:] = [
                part[:, :, :length].clone()
                for layer in range(LAYERS)
                for part in session.cache.standard(layer)
            ]

        drafter.fused_steps = note  # type: ignore[method-assign]
        out = generate(decoder, SpeculativeStep(drafter), PROMPTS[:1], stop=stop, after_step=keep)
        stats = replace(out.stats, seconds=0.0, prefill_seconds=0.0, split=None)
        seen.append((out.sequences, stats, stored, calls[0]))
    (text, stats, store, many), (its_text, its_stats, its_store, few) = seen
    assert text == its_text
    assert stats == its_stats
    assert all(torch.equal(a, b) for a, b in zip(store, its_store, strict=True))
    assert few < many == stats.target_passes


def test_steps_in_a_call_end_with_the_text(decoders: dict[str, Decoder]) -> None:
    decoder = of(decoders, "native")
    if not narrow_weights(decoder):
        pytest.skip("this processor multiplies no bytes")
    whole = with_margin(decoder, 0.0).sequences[0]
    for place in range(1, len(whole)):
        last = whole[place]
        end = whole.index(last) + 1
        stop = replace(STOP, eos_token_ids=(last,))
        out = run(decoder, carry(), PROMPTS[:1], margin=0.0, lookup=3, stop=stop)
        assert (out.sequences, out.finish_reasons) == ([whole[:end]], ["eos"])
        assert out.stats.tokens == end
        assert out.stats.sequence_steps == out.stats.target_passes < max(end, 2)


def test_what_a_doubt_asks_the_model_makes_older_keys_and_values_exact(
    decoders: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that the narrow copy alone has run go with the next ones in doubt: with room for all of
    them, only those since the last doubt are not as a fresh prefill has them.
    """
    decoder = of(decoders, "native")
    if not narrow_weights(decoder):
        pytest.skip("this processor multiplies no bytes")
    far: dict[int, int] = {}
    for refresh in (0, 8):
        monkeypatch.setattr(fused_steps, "REFRESH", refresh)
        drafter = M2R2Drafter(decoder, carry(), M2R2DecodeConfig(margin=0.3, lookup=3))
        stored: list[torch.Tensor] = []

        def keep(session: Session, step: Step, stored: list[torch.Tensor] = stored) -> None:
            length = session.cache.lengths[0]
            stored[:] = [session.cache.standard(LAYERS - 1)[0][0, :, :length].clone()]
            tokens = session.sampler.tokens[0][:length]
            cache, rows = decoder.new_cache(1, length), Rows.causal(0, 0, length)
            decoder.layers(decoder.embed(torch.tensor(tokens), rows.pos), rows, 0, LAYERS, cache)
            stored.append(cache.standard(LAYERS - 1)[0][0, :, :length].clone())

        generate(decoder, SpeculativeStep(drafter), [PROMPTS[0]], stop=STOP, after_step=keep)
        ours, fresh = stored
        far[refresh] = int(((ours - fresh).abs().amax(dim=(0, 2)) > 1e-4).sum())
    assert far[8] < far[0]


def test_a_margin_decides_greedy_steps_of_one_sequence_only(decoders: dict[str, Decoder]) -> None:
    """Batches, drawn tokens and penalties are the model's own, token for token."""
    decoder = of(decoders, "native")
    assert with_margin(decoder, 0.0, PROMPTS).sequences == plain_text(decoder, PROMPTS)
    for sampling in (
        SAMPLINGS["penalty"],
        SAMPLINGS["sampled"],
        SamplingSettings(temperature=0.8, seed=3),
    ):
        out = with_margin(decoder, 0.0, sampling=sampling)
        assert out.sequences == plain_text(decoder, PROMPTS[:1], sampling=sampling)


def test_a_text_with_a_margin_depends_on_no_text_before(decoders: dict[str, Decoder]) -> None:
    decoder = of(decoders, "native")
    first = with_margin(decoder, 0.05)
    with_margin(decoder, 0.05, PROMPTS[1:2])
    again = with_margin(decoder, 0.05)
    assert first.sequences == again.sequences
    assert first.stats.sequence_steps == again.stats.sequence_steps


@pytest.mark.parametrize("prompt_weights", ["own", "narrow"])
@pytest.mark.parametrize("threshold", [None, 0.1])
def test_a_conversation_with_a_margin_goes_on_from_what_the_copy_left(
    decoders: dict[str, Decoder], prompt_weights: str, threshold: float | None
) -> None:
    """What is exact is told apart; where the copy reads prompts, too, and nothing is in doubt, the
    text is as if all had been read anew.
    """
    decoder = of(decoders, "native")
    if not narrow_weights(decoder):
        pytest.skip("this processor multiplies no bytes")
    settings = M2R2DecodeConfig(
        margin=0.0,
        prompt_weights=prompt_weights,  # type: ignore[arg-type]
        exit_thresholds=None if threshold is None else (threshold,),
    )
    step, kept, prompt, read = step_of(decoder, carry(), settings), PrefixCache(), PROMPTS[0] * 3, 0
    for turn in range(3):
        out = generate(
            decoder, step, [prompt], stop=STOP, prefix_cache=kept, after_step=check_invariants
        )
        assert out.stats.resumed >= read - 1
        if prompt_weights == "narrow":
            fresh = generate(decoder, step_of(decoder, carry(), settings), [prompt], stop=STOP)
            assert out.sequences == fresh.sequences
            assert kept.exact == len(kept.tokens)
        elif not turn:
            assert kept.exact == len(prompt) < len(kept.tokens)
        read = len(prompt)
        if threshold is None:  # else the stream has not read all of the answer
            read += len(out.sequences[0]) - 1
        prompt = [*prompt, *out.sequences[0], 5, 6]
    generate(decoder, step, [prompt], SAMPLINGS["sampled"], STOP, prefix_cache=kept)
    if prompt_weights == "narrow":
        assert kept.exact == len(prompt)  # the model's own weights have decoded the answer


def test_prompts_that_the_narrow_copy_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made of them is another decoder's: where that is the model, the model's own."""
    decoder = NativeDecoder(model_of(LLAMA, torch.bfloat16))
    if not narrow_weights(decoder):
        pytest.skip("this processor multiplies no bytes")
    assert M2R2Drafter(decoder, carry(), M2R2DecodeConfig(margin=0.0)).prompt_decoder is None
    own = with_margin(decoder, 1e9)
    stored: list[torch.Tensor] = []

    def keep(session: Session, _: Step) -> None:
        stored.append(session.cache.standard(LAYERS - 1)[0][0, :, : len(PROMPTS[0])].clone())

    texts = []
    copy = decoder.narrow()
    assert copy is not None
    same = replace(copy, layers=decoder.packed_layers, head=decoder.head)
    for weights in (copy, same):
        monkeypatch.setattr(decoder, "_narrow", weights)
        texts.append(
            run(
                decoder,
                carry(),
                PROMPTS[:1],
                check=keep,
                margin=1e9,
                lookup=3,
                prompt_weights="narrow",
            ).sequences
        )
    cache, rows = decoder.new_cache(1, 64), Rows.causal(0, 0, len(PROMPTS[0]))
    x = decoder.embed(torch.tensor(PROMPTS[0]), rows.pos)
    decoder.layers(x, rows, 0, LAYERS, cache)
    exact = cache.standard(LAYERS - 1)[0][0, :, : len(PROMPTS[0])]
    assert texts[1] == own.sequences
    assert torch.equal(stored[-1], exact)
    assert not torch.equal(stored[0], exact)
    with pytest.raises(UserError, match=r"'prompt_weights' is 'narrow'; .* together with a margin"):
        M2R2DecodeConfig(prompt_weights="narrow")


def test_a_margin_without_products_of_bytes_is_said_and_lossless(
    decoders: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_said", set(), raising=False)
    decoder = decoders["hf"]
    with pytest.warns(Notice, match="margin=0.5.*verifying all drafts with the full-precision"):
        drafter = M2R2Drafter(decoder, carry(), M2R2DecodeConfig(margin=0.5))
    assert drafter.lossless
    with pytest.raises(UserError, match=r"'margin' is -1; accepted: 0 or above"):
        M2R2DecodeConfig(margin=-1)


def test_trusted_tokens_come_on_top_of_the_limits(decoders: dict[str, Decoder]) -> None:
    decoder, stream = of(decoders, "native"), carry()
    steps = {}
    for most in (0, 5, 20):
        out = run(
            decoder,
            stream,
            PROMPTS[:1],
            stop=StopSettings(max_new_tokens=60),
            exit_thresholds=[0.0],
            depth=3,
            nodes=4,
            trusted=most,
        )
        # all are trusted, of which the limits allow one without their help
        steps[most] = out.stats.sequence_steps
    assert steps[20] < steps[5] < steps[0]


@pytest.mark.parametrize("backend", ["hf", "native"])
def test_no_clock_decides_what_is_said(
    decoders: dict[str, Decoder], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, stream = of(decoders, backend), carry()
    settings = {
        "exit_thresholds": middle_score(decoder, stream, 1),
        "exit_score": "arla",
        "lookup": 4,
    }
    said = []
    for seconds in ([1e-9], [1e-3, 5.0, 1e-6, 80.0]):
        ticks = itertools.accumulate(itertools.cycle(seconds))
        monkeypatch.setattr(draft_length, "now", ticks.__next__)
        out = run(decoder, stream, PROMPTS[:1], stop=StopSettings(max_new_tokens=60), **settings)
        said.append((out.sequences, out.stats.drafted, out.stats.sequence_steps))
    assert said[0] == said[1]


def test_the_kernels_arla_is_the_modules(decoders: dict[str, Decoder]) -> None:
    decoder = of(decoders, "native")
    assert isinstance(decoder, NativeDecoder)
    stream = carry(scale=0.2)
    runner = NativeStreamRunner(decoder, stream, 1)
    p = 3 * torch.randn(7, LLAMA.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = StreamRunner.agreement(runner, p)
    assert max(expected) - min(expected) > 0.05
    assert runner.agreement(p) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("score", ["arla", "confidence"])
def test_the_trained_accelerators_steps_are_fused(score: str) -> None:
    """To the token as in parts, and in fewer passes the more is trusted."""
    model = load_model("tiny", dtype="bfloat16")
    skip_without_kernel()
    decoder = NativeDecoder(model.model)
    stream = Accelerator.from_pretrained(
        reference_accelerators("tiny")["m2r2-carry"], model.model
    ).module
    prompt = model.tokenizer("The cat sat on the mat and the dog")["input_ids"]
    passes = []
    for threshold in (NEVER, 0.5, 0.0):
        outs = []
        for whole in (True, False):
            step = step_of(
                decoder,
                stream,
                CarryDecodeConfig(exit_thresholds=[threshold], exit_score=score),  # type: ignore[arg-type]
            )
            assert isinstance(step, SpeculativeStep)
            if not whole:
                step.drafter.fused_steps = lambda *given: None  # type: ignore[method-assign]
            outs.append(generate(decoder, step, [prompt], stop=StopSettings(max_new_tokens=48)))
        assert outs[0].sequences == outs[1].sequences
        assert outs[0].stats.exits == outs[1].stats.exits
        passes.append(outs[0].stats.sequence_steps)
    assert passes[0] >= passes[1] >= passes[2] and passes[0] > passes[2]


def test_what_is_refused(decoders: dict[str, Decoder]) -> None:
    decoder = decoders["hf"]
    with pytest.raises(UserError, match=r"has 2 values; accepted: one .* gates \[1, 2, 3\]"):
        step_of(decoder, gates(), M2R2DecodeConfig(exit_thresholds=[0.5, 0.5]))  # type: ignore[arg-type]
    for stream, count in ((gates(arla_dim=0), 3), (carry(arla_dim=0), 1)):
        thresholds = {"exit_thresholds": [0.5] * count}
        with pytest.raises(UserError, match=r"needs an accelerator with ARLA; .* arla_dim=0"):
            step_of(decoder, stream, M2R2DecodeConfig(exit_score="arla", **thresholds))  # type: ignore[arg-type]
        step_of(decoder, stream, M2R2DecodeConfig(**thresholds))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="without carry and block"):
        step_of(
            decoder,
            carry(gates=(1, 2)),
            M2R2DecodeConfig(exit_thresholds=[0.5, 0.5]),  # type: ignore[arg-type]
        )
    with pytest.raises(UserError, match="needs reinitialise=true"):
        step_of(
            decoder,
            gates(fuse=True, reinitialise=False),
            M2R2DecodeConfig(exit_thresholds=[0.5] * 3),  # type: ignore[arg-type]
        )
    with pytest.raises(UserError, match="kv='propagate' needs an accelerator with several gates"):
        step_of(decoder, carry(), M2R2DecodeConfig(exit_thresholds=[0.5], kv="propagate"))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="exit_thresholds"):
        M2R2DecodeConfig(exit_thresholds=["much"])  # type: ignore[arg-type]
