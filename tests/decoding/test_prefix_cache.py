"""A conversation's next turn goes on in the kept cache: the same text, and the same drafts, as read
from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_kernel import skip_without_kernel

from decoding.invariants import check_invariants
from multirate.decoding import session
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.prefix_cache import MIN_SHARED, PrefixCache
from multirate.decoding.results import GenerationOutput
from multirate.decoding.session import Session
from multirate.decoding.speculate.drafter import Drafter
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.engine import PLAIN, attach
from multirate.errors import UserError
from multirate.methods._shared.branch_drafter import BranchDrafter
from multirate.methods._shared.draft_runner import PackedRunner
from multirate.methods._shared.feature_drafter import FeatureDrafter
from multirate.methods._shared.shape import BaseShape
from multirate.methods.eagle3.config import Eagle3Config, Eagle3DecodeConfig
from multirate.methods.eagle3.modules import Eagle3Layer
from multirate.methods.hydra.config import HydraConfig, HydraDecodeConfig
from multirate.methods.hydra.decode import HydraDrafter
from multirate.methods.hydra.modules import HydraHeads
from multirate.methods.kangaroo.config import KangarooConfig
from multirate.methods.kangaroo.decode import KangarooDecodeConfig, KangarooDrafter
from multirate.methods.kangaroo.modules import KangarooAdapter
from multirate.methods.m2r2.config import M2R2Config
from multirate.methods.m2r2.decode import M2R2DecodeConfig, M2R2Drafter
from multirate.methods.m2r2.modules import AcceleratedStream
from multirate.methods.spec import find
from multirate.runtime.decoder import Decoder
from multirate.runtime.load import load_decoder
from multirate.runtime.native import NativeDecoder
from multirate.runtime.native.cache import NativeKVCache

VOCAB = 61
LLAMA = tf.LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=400,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
DRAFTERS = (
    "layerskip",
    "prompt_lookup",
    "sam",
    "kangaroo",
    "m2r2",
    "m2r2-carry",
    "m2r2-carry, a window",
    "eagle3",
    "eagle3, a window",
    "hydra",
)


def scaled(module: Any, spread: float) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(spread)
    return module


def model(dtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    return scaled(tf.AutoModelForCausalLM.from_config(LLAMA).eval(), 3.0).to(dtype)


@pytest.fixture(scope="module")
def decoders() -> dict[str, Decoder]:
    made: dict[str, Decoder] = {"hf": load_decoder(model(torch.float32), "hf")}
    low = model(torch.bfloat16)
    if NativeDecoder.supports(low) is None:
        made["native"] = NativeDecoder(low)
    return made


WINDOW = 16


def drafter_of(name: str, decoder: Decoder) -> Drafter:
    """One that the test says: `NAME`, or `NAME, a window` where its own layer sees few tokens."""
    torch.manual_seed(7)
    name, _, narrow = name.partition(", ")
    seen = WINDOW if narrow else None
    shape = BaseShape.of(LLAMA)
    if name == "kangaroo":
        # nearly the early exit after all layers but one: some drafts are accepted
        config = KangarooConfig.for_base(shape, exit_layer=3)
        chain = KangarooDecodeConfig(window=seen, threshold=0.0, max_draft=4)
        return KangarooDrafter(decoder, KangarooAdapter(config, shape), chain)
    if name.startswith("m2r2"):
        stream = AcceleratedStream(M2R2Config.for_base(shape, name, gates=(2,)), shape)
        with torch.no_grad():
            for parameter in stream.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return M2R2Drafter(
            decoder,
            stream,
            M2R2DecodeConfig(
                depth=4, width=2, nodes=9, draft_threshold=0.0, verify_threshold=0.0, window=seen
            ),
        )
    if name == "eagle3":
        layer = Eagle3Layer(Eagle3Config.for_base(shape), shape)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        tree = Eagle3DecodeConfig(
            depth=4, width=2, nodes=9, draft_threshold=0.0, verify_threshold=0.0, window=seen
        )
        return FeatureDrafter(decoder, layer, tree)
    if name == "hydra":
        heads = HydraHeads(HydraConfig.for_base(shape, layers=2), shape)
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        every = HydraDecodeConfig(nodes=9, draft_threshold=0.0, verify_threshold=0.0)
        return HydraDrafter(decoder, heads, every)
    options = {"exit_layer": 2, "tokens": 3} if name == "layerskip" else None
    drafter = find(name).make_drafter(decoder, None, options)
    assert drafter is not None
    return drafter


def generator(
    name: str, decoder: Decoder, checked: bool = False
) -> Callable[..., GenerationOutput]:
    """generate(prompt, count, **settings) with one drafter that lives as long as the function."""
    if name == PLAIN:
        return lambda prompt, count, prefix_cache=None, **more: generate(
            decoder,
            PlainStep(),
            [prompt],
            stop=StopSettings(max_new_tokens=count),
            prefix_cache=prefix_cache,
            **more,
        )
    drafter = drafter_of(name, decoder)

    def check(session: Session, step: Step) -> None:
        if checked:
            check_invariants(session, step, atol=2e-4)

    return lambda prompt, count, prefix_cache=None, **more: generate(
        decoder,
        SpeculativeStep(drafter),
        [prompt],
        stop=StopSettings(max_new_tokens=count),
        after_step=check,
        prefix_cache=prefix_cache,
        **more,
    )


def counts(output: GenerationOutput) -> tuple[int, ...]:
    s = output.stats
    return s.drafted, s.drafted_levels, s.accepted, s.sequence_steps, s.target_passes


@pytest.mark.parametrize("backend", ["hf", "native"])
@pytest.mark.parametrize("name", [PLAIN, *DRAFTERS])
@settings(
    max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 999))
def test_turns_are_as_if_read_from_the_start(
    decoders: dict[str, Decoder], backend: str, name: str, seed: int
) -> None:
    if backend not in decoders:
        skip_without_kernel()
    decoder, rng = decoders[backend], np.random.default_rng(seed)
    going_on = generator(name, decoder, checked=backend == "hf")
    prefix_cache, before = PrefixCache(), 0
    history: list[int] = rng.integers(3, VOCAB, 40).tolist()
    for _ in range(5):
        count = int(rng.choice([0, 1, 2, 9, 17]))
        output = going_on(history, count, prefix_cache)
        fresh = generator(name, decoder)(history, count)
        assert output.sequences == fresh.sequences
        assert counts(output) == counts(fresh), (
            "drafts differ: what the drafter kept is not what it would compute"
        )
        assert output.stats.resumed > 0 or before < 2, (
            "a generation that drafted leaves something to go on from"
        )
        before = count
        # the next turn: the text so far, sometimes cut (an edited or regenerated answer), and
        # something new
        history = [*history, *output.sequences[0]]
        cut = int(rng.integers(0, 6)) if rng.random() < 0.5 else 0
        history = [
            *history[: len(history) - cut],
            *rng.integers(3, VOCAB, int(rng.integers(1, 7))).tolist(),
        ]


def own_store(drafter: BranchDrafter, begin: int, end: int) -> list[torch.Tensor]:
    """Slots [begin, end) of the drafter's own keys and values."""
    runner: Any = drafter.runner
    cache = runner.packed._own if isinstance(runner, PackedRunner) else runner._own
    assert cache is not None
    stores = (
        cache.standard(0) if isinstance(cache, NativeKVCache) else (cache.keys[0], cache.values[0])
    )
    return [store[0, :, begin:end].clone() for store in stores]


@pytest.mark.parametrize("backend", ["hf", "native"])
@pytest.mark.parametrize(
    "name",
    [one + seen for one in ("kangaroo", "m2r2-carry", "eagle3") for seen in ("", ", a window")],
)
@settings(
    max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 999))
def test_what_a_drafter_says_it_kept_is_what_it_would_compute(
    decoders: dict[str, Decoder], backend: str, name: str, seed: int
) -> None:
    if backend not in decoders:
        skip_without_kernel()
    decoder, rng = decoders[backend], np.random.default_rng(seed)
    drafter, prefix_cache = drafter_of(name, decoder), PrefixCache()
    history: list[int] = rng.integers(3, VOCAB, 30).tolist()
    compared = 0
    for turn in range(6):
        stop = StopSettings(max_new_tokens=int(rng.choice([1, 2, 9, 30])) if turn else 30)
        output = generate(
            decoder, SpeculativeStep(drafter), [history], stop=stop, prefix_cache=prefix_cache
        )
        assert prefix_cache.cache is not None
        kept = drafter.usable(prefix_cache.cache, len(prefix_cache.tokens))
        if kept:
            fresh = drafter_of(name, decoder)
            generate(
                decoder,
                SpeculativeStep(fresh),
                [[*prefix_cache.tokens, 3]],
                stop=StopSettings(max_new_tokens=4),
            )
            assert isinstance(drafter, BranchDrafter) and isinstance(fresh, BranchDrafter)
            # what waits for the next draft is kept as tokens
            kept = min(kept, drafter._reading.backfilled, fresh._reading.backfilled)
            begin = max(drafter._reading.seen_from, fresh._reading.seen_from)
            compared += max(0, kept - begin)
            stores = (own_store(one, begin, kept) for one in (drafter, fresh))
            for ours, theirs in zip(*stores, strict=True):
                torch.testing.assert_close(
                    ours, theirs, rtol=0, atol=0 if backend == "native" else 1e-4
                )
        history = [*history, *output.sequences[0]]
        history = [
            *history[: len(history) - int(rng.integers(0, 9))],
            *rng.integers(3, VOCAB, 5).tolist(),
        ]
    assert compared  # how much: by how often the clock lets the stream draft


def test_only_what_is_new_is_read(
    decoders: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoders["hf"]
    read: list[int] = []
    layers = decoder.layers
    monkeypatch.setattr(
        decoder,
        "layers",
        lambda x, *rest, **more: (read.append(len(x)), layers(x, *rest, **more))[1],
    )
    for name in (PLAIN, *DRAFTERS):
        prefix_cache, generate = PrefixCache(), generator(name, decoder)
        prompt = [5, *range(3, 40)]
        first = generate(prompt, 6, prefix_cache)
        assert first.stats.resumed == 0
        after = [*prompt, *first.sequences[0], 9, 9, 9]
        read.clear()
        second = generate(after, 6, prefix_cache)
        # at most the last draft's rows, the token in common read again, the new ones, and the last
        # emitted one
        assert second.stats.resumed >= len(prompt) + 6 - 1 - 9, name
        assert read[0] == len(after) - second.stats.resumed, name


def test_other_prompts_and_batches_begin_anew(decoders: dict[str, Decoder]) -> None:
    decoder, prefix_cache = decoders["hf"], PrefixCache()
    prompt, other = list(range(3, 30)), list(range(30, 57))
    generate(decoder, PlainStep(), [prompt], stop=StopSettings(5), prefix_cache=prefix_cache)
    held = prefix_cache.tokens
    both = generate(
        decoder, PlainStep(), [prompt, other], stop=StopSettings(5), prefix_cache=prefix_cache
    )
    assert both.stats.resumed == 0 and prefix_cache.tokens == held
    out = generate(decoder, PlainStep(), [other], stop=StopSettings(5), prefix_cache=prefix_cache)
    assert out.stats.resumed == 0
    assert out.sequences[0] == both.sequences[1]
    assert prefix_cache.tokens[: len(other)] == other
    few = [*other[: MIN_SHARED - 1], 5, 5, 5]
    assert (
        generate(
            decoder, PlainStep(), [few], stop=StopSettings(2), prefix_cache=prefix_cache
        ).stats.resumed
        == 0
    )


def test_the_same_prompt_again_reads_one_token_or_two(decoders: dict[str, Decoder]) -> None:
    decoder, prefix_cache, prompt = decoders["hf"], PrefixCache(), list(range(3, 30))
    first = generate(
        decoder, PlainStep(), [prompt], stop=StopSettings(5), prefix_cache=prefix_cache
    )
    again = generate(
        decoder, PlainStep(), [prompt], stop=StopSettings(5), prefix_cache=prefix_cache
    )
    assert again.sequences == first.sequences
    assert again.stats.resumed == len(prompt) - 2


@pytest.mark.parametrize("name", [PLAIN, *DRAFTERS])
def test_an_interrupted_generation_leaves_nothing(decoders: dict[str, Decoder], name: str) -> None:
    decoder, prefix_cache, prompt = decoders["hf"], PrefixCache(), list(range(3, 30))
    generate = generator(name, decoder)
    true = generate(prompt, 12).sequences
    generate(prompt, 12, prefix_cache)
    calls = []

    def stop_there(seq: int, tokens: list[int]) -> None:
        calls.append(tokens)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate([*prompt[:-2], 7, 7], 40, prefix_cache, on_tokens=stop_there)
    assert prefix_cache.cache is None
    after = generate(prompt, 12, prefix_cache)
    assert after.sequences == true and after.stats.resumed == 0


def test_sampled_turns_are_the_same_draws(decoders: dict[str, Decoder]) -> None:
    sampling = SamplingSettings(temperature=0.9, seed=5)
    for name in (PLAIN, *DRAFTERS):
        generate, prefix_cache = generator(name, decoders["hf"]), PrefixCache()
        prompt = list(range(3, 30))
        first = generate(prompt, 8, prefix_cache, sampling=sampling)
        after = [*prompt, *first.sequences[0], 4, 4]
        second = generate(after, 12, prefix_cache, sampling=sampling)
        assert second.stats.resumed > 0
        assert (
            second.sequences
            == generator(name, decoders["hf"])(after, 12, sampling=sampling).sequences
        )


def test_a_prefix_longer_than_its_cache(
    decoders: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_NEXT_TURN_SLOTS", 0)
    for backend in decoders:
        for name in (PLAIN, "m2r2-carry", "kangaroo"):
            decoder = load_decoder(
                model(torch.float32 if backend == "hf" else torch.bfloat16), backend
            )
            generate, prefix_cache = generator(name, decoder), PrefixCache()
            history = list(range(3, 20))
            generate(history, 3, prefix_cache)
            cache = prefix_cache.cache
            assert cache is not None
            long = [*history, *(3 + i % 50 for i in range(300))]
            assert cache.capacity < len(long)
            output = generate(long, 40, prefix_cache)
            assert output.stats.resumed > 0
            assert output.sequences == generator(name, decoder)(long, 40).sequences, (backend, name)


def test_an_engine_keeps_one_prefix_per_method_within_its_bytes() -> None:
    engine = attach(model(torch.float32), backend="hf")
    prompt = list(range(3, 30))
    for name in (PLAIN, "prompt_lookup"):
        first = engine.generate([prompt], stop=StopSettings(5), method=name, speculate="always")
        again = engine.generate(
            [[*prompt, *first.sequences[0], 5]],
            stop=StopSettings(5),
            method=name,
            speculate="always",
        )
        assert again.stats.resumed >= len(prompt), name
    engine.forget()
    assert engine.generate([prompt], stop=StopSettings(5), method=PLAIN).stats.resumed == 0
    engine.keep_bytes = 1
    engine.generate([prompt], stop=StopSettings(5), method=PLAIN)
    assert engine.generate([prompt], stop=StopSettings(5), method=PLAIN).stats.resumed == 0
    engine.keep_bytes = 0
    assert engine.generate([prompt], stop=StopSettings(5), method=PLAIN).stats.resumed == 0
    with pytest.raises(UserError):
        engine.generate([[]], stop=StopSettings(5), method=PLAIN)
