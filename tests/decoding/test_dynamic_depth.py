"""Rows that leave early: plain decoding where none does, exact K/V where they are deferred, honest
ones elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_kernel import skip_without_kernel

from decoding.invariants import check_invariants
from multirate.decoding.dynamic_depth import KV_OF_SKIPPED_LAYERS, DynamicDepthStep
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.prefix_cache import PrefixCache
from multirate.decoding.session import Session
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.runtime.decoder import Decoder
from multirate.runtime.load import load_decoder
from multirate.runtime.native import NativeDecoder

from .examples import ConfidentDepth, RandomDepth, SkipSchedule, never
from .helpers import reference, tiny

LAYERS = 5
PROMPTS = [[3, 7, 1, 9], [5], [2, 2, 8, 4, 11, 6, 1]]
STOP = StopSettings(max_new_tokens=17)
SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@pytest.fixture(scope="module")
def native() -> NativeDecoder:
    config = tf.Qwen3Config(
        vocab_size=61,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=200,
    )
    torch.manual_seed(2)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.5).add_(torch.randn_like(parameter) * 0.02)
    model = model.to(torch.bfloat16)
    skip_without_kernel()
    decoder = load_decoder(model, "native")
    assert isinstance(decoder, NativeDecoder)
    return decoder


def decoder_of(backend: str, native: NativeDecoder) -> Decoder:
    return native if backend == "native" else tiny(0, layers=LAYERS)[1]


def bits(backend: str) -> float:
    return 0.0 if backend == "native" else 1e-4


@pytest.mark.parametrize("backend", ["hf", "native"])
@pytest.mark.parametrize("kv", ["propagate", "deferred"])
@pytest.mark.parametrize("sampling", [SamplingSettings(), SamplingSettings(0.9, seed=4)])
def test_a_policy_that_never_leaves_is_plain_decoding(
    native: NativeDecoder, backend: str, kv: Any, sampling: SamplingSettings
) -> None:
    decoder = decoder_of(backend, native)
    step = DynamicDepthStep(never((1, 3)), kv)
    out = generate(decoder, step, PROMPTS, sampling, STOP, after_step=check_invariants)
    assert out.sequences == generate(decoder, PlainStep(), PROMPTS, sampling, STOP).sequences
    assert out.stats.exits == {LAYERS: out.stats.tokens - 3}
    if backend == "hf" and sampling.greedy:
        model, _ = tiny(0, layers=LAYERS)
        assert out.sequences == [reference(model, p, 17) for p in PROMPTS]


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW)
@given(
    backend=st.sampled_from(["hf", "native"]),
    exits=st.sets(st.integers(1, LAYERS - 1), min_size=1),
    chance=st.sampled_from([0.2, 0.5, 0.9, 1.0]),
    batch=st.sampled_from([1, 3]),
    seed=st.integers(0, 999),
)
def test_deferred_kv_are_a_fresh_prefills(
    native: NativeDecoder, backend: str, exits: set[int], chance: float, batch: int, seed: int
) -> None:
    """After every step where they are there, and after flushing everywhere; bit for bit on the
    kernel.
    """
    decoder = decoder_of(backend, native)
    step = DynamicDepthStep(RandomDepth(tuple(sorted(exits)), seed, chance), "deferred")
    steps = 0

    def check(session: Session, step: Step) -> None:
        nonlocal steps
        steps += 1
        for b in range(batch):
            holes = step.holes(b)
            assert [hole.start for hole in holes] == sorted((h.start for h in holes), reverse=True)
            assert session.exact_length(b) == session.cache.lengths[b]
        if not session.active:
            assert isinstance(step, DynamicDepthStep)
            step.flush(session)
            assert not any(step.holes(b) for b in range(batch))
        if steps % 4 == 0 or not session.active:
            check_invariants(session, step, atol=bits(backend))

    stop = StopSettings(max_new_tokens=12)
    generate(decoder, step, PROMPTS[:batch], stop=stop, after_step=check)


@pytest.mark.parametrize("backend", ["hf", "native"])
def test_rows_of_a_batch_leave_at_their_own_layers(native: NativeDecoder, backend: str) -> None:
    """A sequence's text does not depend on where its neighbours leave."""
    decoder = decoder_of(backend, native)

    class ByText(RandomDepth):
        """The exit depends on the text alone: the last token of the sequence."""

        def begin(self, session: Session) -> None:
            self.tokens = session.sampler.tokens

        def leave(self, exit: int, hidden: torch.Tensor, seqs: Any) -> Any:
            said = super().leave(exit, hidden, seqs)
            return type(said)([(self.tokens[b][-1] * 7 + exit) % 4 == 0 for b in seqs])

    for kv in ("propagate", "deferred"):
        step = DynamicDepthStep(ByText((1, 2, 4), 0), kv)  # type: ignore[arg-type]
        together = generate(decoder, step, PROMPTS, stop=STOP, after_step=check_invariants)
        apart = [generate(decoder, step, [p], stop=STOP) for p in PROMPTS]
        assert together.sequences == [out.sequences[0] for out in apart]
        assert len(together.stats.exits) == 4
        left = {
            layers: sum(out.stats.exits.get(layers, 0) for out in apart)
            for layers in (1, 2, 4, LAYERS)
        }
        assert together.stats.exits == left


def test_confidence_takes_the_exits_token_and_says_where_kv_end() -> None:
    model, decoder = tiny(0, layers=LAYERS)
    for threshold, exits in ((0.0, {2}), (1.1, {LAYERS}), (0.5, {2, LAYERS})):
        step = DynamicDepthStep(ConfidentDepth(decoder, (2,), threshold))
        lengths: list[int] = []

        def check(session: Session, step: Step, lengths: list[int] = lengths) -> None:
            check_invariants(session, step)
            lengths[:] = [session.exact_length(b) for b in range(3)]

        out = generate(decoder, step, PROMPTS, stop=STOP, after_step=check)
        assert set(out.stats.exits) == exits
        assert not step.lossless
        if threshold == 1.1:
            assert out.sequences == [reference(model, p, 17) for p in PROMPTS]
            assert lengths == [len(p) + 16 for p in PROMPTS]
        if threshold == 0.0:
            assert lengths == [len(p) for p in PROMPTS]


@pytest.mark.parametrize("backend", ["hf", "native"])
def test_a_schedule_for_the_whole_batch(native: NativeDecoder, backend: str) -> None:
    decoder = decoder_of(backend, native)
    step = DynamicDepthStep(SkipSchedule(LAYERS), "none")
    ends: list[int] = []

    def check(session: Session, step: Step) -> None:
        check_invariants(session, step, atol=bits(backend))
        ends.append(session.exact_length(0))

    out = generate(decoder, step, PROMPTS, stop=STOP, after_step=check)
    # three steps run all layers; the first token that skips one is not exact any more
    assert ends[2] == len(PROMPTS[0]) + 3 == ends[-1]
    assert out.stats.exits == {LAYERS: 9, LAYERS - 1: 12, LAYERS - 2: 12, LAYERS - 3: 15}


def test_schedules_that_break_their_rules_are_refused() -> None:
    _, decoder = tiny(0, layers=LAYERS)

    def run(policy: Any, kv: Any) -> None:
        generate(decoder, DynamicDepthStep(policy, kv), PROMPTS, stop=STOP)

    with pytest.raises(ValueError, match="run again after a token that skipped them"):
        run(SkipSchedule(LAYERS, grow=True), "none")
    with pytest.raises(ValueError, match="needs a schedule"):
        run(never((1,)), "none")
    with pytest.raises(ValueError, match="a schedule needs it"):
        run(SkipSchedule(LAYERS), "deferred")
    for ranges in ([], [(0, 2), (1, 5)], [(0, 6)], [(3, 3)], [(-1, 2)]):
        policy = never(())
        policy.schedule = lambda session, seqs, ranges=ranges: ranges
        with pytest.raises(ValueError, match="accepted: increasing layer ranges"):
            run(policy, "none")
    for exits in ((2, 1), (1, 1), (0,), (LAYERS,)):
        with pytest.raises(ValueError, match="increasing numbers"):
            run(never(exits), "propagate")
    with pytest.raises(ValueError, match=f"accepted: {', '.join(KV_OF_SKIPPED_LAYERS)}"):
        DynamicDepthStep(never(()), "recompute")  # type: ignore[arg-type]


@pytest.mark.parametrize("kv", KV_OF_SKIPPED_LAYERS)
@pytest.mark.parametrize("backend", ["hf", "native"])
def test_a_kept_prefix_holds_exact_kv_only(native: NativeDecoder, backend: str, kv: Any) -> None:
    """The next turn, read by another kind of step, is as if read from the start."""
    decoder = decoder_of(backend, native)
    policy = SkipSchedule(LAYERS) if kv == "none" else RandomDepth((1, 3), 3, chance=0.7)
    step, kept = DynamicDepthStep(policy, kv), PrefixCache()
    prompt = [3, 7, 1, 9, 4, 4, 8, 2, 6, 12]
    first = generate(decoder, step, [prompt], stop=STOP, prefix_cache=kept)
    whole = len(prompt) + len(first.sequences[0])
    if kv == "deferred":
        assert len(kept.tokens) == whole - 1, "what waited has been run"
    else:
        assert len(prompt) <= len(kept.tokens) < whole - 1, "what is not exact has been cut off"
    following = [*prompt, *first.sequences[0], 5, 6]
    plain = generate(decoder, PlainStep(), [following], stop=STOP, prefix_cache=kept)
    assert plain.stats.resumed >= len(prompt) - 1
    assert plain.sequences == generate(decoder, PlainStep(), [following], stop=STOP).sequences
