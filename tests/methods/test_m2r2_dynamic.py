"""M2R2's dynamic mode: exact K/V whatever leaves, each token where its gate's score passes, and the
base's own text where none does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from decoding.invariants import check_invariants
from native_kernel import skip_without_kernel

from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.prefix_cache import PrefixCache
from multirate.decoding.results import GenerationOutput
from multirate.decoding.session import Session
from multirate.decoding.speculate import budget as draft_length
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.loading.hub import load_model, reference_accelerators
from multirate.methods._shared.draft_runner import PackedRunner
from multirate.methods._shared.teacher import Teacher
from multirate.methods.m2r2.decode import M2R2Drafter, make_runner
from multirate.methods.m2r2.decode_config import CarryDecodeConfig, M2R2DecodeConfig
from multirate.methods.m2r2.exits import step_of
from multirate.methods.m2r2.modules import AcceleratedStream
from multirate.methods.m2r2.runner import StreamRunner
from multirate.methods.m2r2.train import M2R2Objective
from multirate.runtime.decoder import Decoder
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.native import NativeDecoder
from multirate.runtime.native.fused_sequences import NativeFusedSequences
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
@pytest.mark.parametrize("way", ["one", "deferred"])
def test_kv_are_complete_after_every_step(
    decoders: dict[str, Decoder], backend: str, sampling: str, share: str, way: str
) -> None:
    """Those of a fresh prefill."""
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
    )
    assert not inexact
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
        "lookup": "sam",
    }
    if way == "one":  # drafts are seldom made where few of them are accepted
        settings["exit_thresholds"] = [settings["exit_thresholds"][0] - 0.05]
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
        lookup="sam",
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
    settings = {"exit_thresholds": [0.0] * count}
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
@pytest.mark.parametrize("lookup", [0, "sam"])
@pytest.mark.parametrize("score", ["arla", "confidence"])
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.2, 0.5, NEVER])
def test_fused_steps_are_steps_in_parts(
    decoders: dict[str, Decoder], threshold: float, score: str, lookup: Any, seed: int
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
        unverified=9,
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
    whole = NativeFusedSequences.run

    def note(fused: NativeFusedSequences, seqs: Sequence[int], growths: Sequence[Any]) -> Any:
        kinds.add(frozenset(growth.own for growth in growths))
        return whole(fused, seqs, growths)

    monkeypatch.setattr(NativeFusedSequences, "run", note)
    settings = M2R2DecodeConfig(
        exit_thresholds=middle_score(decoder, stream, 1),  # type: ignore[arg-type]
        exit_score="arla",
        lookup="sam",
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
            lookup="sam",
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
            lookup="sam",
        )
        early += out.stats.exits.get(1, 0)
    assert early > 0


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
            unverified=most,
        )
        # all are unverified, of which the limits allow one without their help
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
        "lookup": "sam",
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
    runner = make_runner(decoder, stream, 1, "int8")
    assert isinstance(runner, PackedRunner)
    p = 3 * torch.randn(7, LLAMA.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = StreamRunner(decoder, stream, 1).agreement(p)
    assert max(expected) - min(expected) > 0.05
    assert runner.agreement(p) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("score", ["arla", "confidence"])
def test_the_trained_accelerators_steps_are_fused(score: str) -> None:
    """To the token as in parts, and in fewer passes the more is unverified."""
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
    with pytest.raises(UserError, match="exit_thresholds"):
        M2R2DecodeConfig(exit_thresholds=["much"])  # type: ignore[arg-type]
