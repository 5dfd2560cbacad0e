"""Methods on models that are built otherwise than Llama: norms of what is added, scaled embeddings,
GELU gates, rotary tables by layer, interleaved rotary embeddings, fused projections. On the native
kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from decoding.invariants import check_invariants
from native_kernel import skip_without_kernel
from transformers import (
    Gemma3TextConfig,
    Glm4Config,
    GraniteConfig,
    HunYuanDenseV1Config,
    Ministral3Config,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    SmolLM3Config,
)

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.methods import spec
from multirate.methods._shared.draft_runner import PackedRunner
from multirate.methods._shared.shape import BaseShape
from multirate.methods.m2r2.decode import M2R2Drafter, make_runner
from multirate.methods.m2r2.decode_config import M2R2DecodeConfig
from multirate.methods.m2r2.runner import StreamRunner
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.native import NativeDecoder
from multirate.runtime.rows import Rows

from .m2r2_models import PROMPTS, model_of, stream_of
from .test_eagle import layer_of

SIZES: dict[str, Any] = dict(
    vocab_size=61,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=160,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)
LAYER_TYPES = ["sliding_attention", "full_attention"] * 2
CONFIGS: dict[str, PretrainedConfig] = {
    "gemma3": Gemma3TextConfig(
        **SIZES, head_dim=64, sliding_window=9, layer_types=LAYER_TYPES, query_pre_attn_scalar=64
    ),
    "glm4": Glm4Config(**SIZES, head_dim=64, attention_bias=True),
    "granite": GraniteConfig(
        **SIZES,
        embedding_multiplier=3.0,
        attention_multiplier=0.1,
        residual_multiplier=0.6,
        logits_scaling=2.0,
    ),
    "hunyuan": HunYuanDenseV1Config(
        **SIZES, head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    ),
    "ministral3": Ministral3Config(
        **SIZES,
        head_dim=32,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 10,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "olmo2": Olmo2Config(**SIZES),
    "phi3": Phi3Config(**SIZES),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[0, 1, 1, 0]),
}
EAGER = {"draft_threshold": 0.02, "verify_threshold": 0.01}
METHODS = [
    "m2r2",
    "m2r2-carry",
    "eagle",
    "eagle3",
    "hydra",
    "kangaroo",
    "medusa",
    "layerskip",
    "lookahead",
    "sam",
    "token_recycling",
]


@functools.cache
def decoder_of(name: str) -> NativeDecoder:
    model = model_of(CONFIGS[name], torch.bfloat16)
    skip_without_kernel()
    return NativeDecoder(model)


def drafter_of(decoder: NativeDecoder, name: str, method: str) -> Any:
    config = CONFIGS[name]
    if method in ("m2r2", "m2r2-carry"):
        stream = stream_of(config, method, gates=(1,), rank=8)
        return M2R2Drafter(decoder, stream, M2R2DecodeConfig(**EAGER))
    settings: dict[str, Any] = {}
    if method in ("eagle", "eagle3", "hydra"):
        settings |= EAGER
    elif method == "layerskip":
        settings["confidence"] = 0.0
    untrained = ("layerskip", "lookahead", "sam", "token_recycling")
    module = None if method in untrained else layer_of(method, BaseShape.of(config))
    return spec.find(method).make_drafter(decoder, module, settings)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CONFIGS)
def test_text_and_kv_are_the_models_own(name: str, method: str) -> None:
    decoder = decoder_of(name)
    drafter = drafter_of(decoder, name, method)

    def check(session: Any, step: Any) -> None:
        check_invariants(session, step, atol=1e-3)

    drafted = 0
    for sampling in (SamplingSettings(), SamplingSettings(temperature=0.8, seed=7)):
        for prompt in (PROMPTS[0], PROMPTS[0] * 4):
            told: dict[str, Any] = {"sampling": sampling, "stop": StopSettings(max_new_tokens=30)}
            step = SpeculativeStep(drafter)
            out = generate(decoder, step, [prompt], after_step=check, **told)
            plain = generate(decoder, PlainStep(), [prompt], **told)
            assert out.sequences == plain.sequences
            drafted += out.stats.drafted
    assert drafted > 0


@pytest.mark.parametrize("gate", [1, 2])  # after one layer m2r2-carry's adapters are merged
@pytest.mark.parametrize("preset", ["m2r2", "m2r2-carry"])
@pytest.mark.parametrize("name", CONFIGS)
def test_kernel_and_torch_modules_draft_alike(name: str, preset: str, gate: int) -> None:
    config = CONFIGS[name]
    streams = [stream_of(config, preset, gates=(gate,), rank=8) for _ in range(2)]
    exact = HFDecoder(model_of(config))
    runners: list[Any] = [
        make_runner(decoder_of(name), streams[0], gate, "bf16"),
        StreamRunner(exact, streams[1], gate),
    ]
    assert isinstance(runners[0], PackedRunner)
    found = []
    for runner in runners:
        runner.begin(runner.decoder.new_cache(1, 32))
        torch.manual_seed(1)
        runner.slow(list(range(12)), Rows.causal(0, 0, 12))
        _, p = runner.step(list(range(14)), Rows.causal(0, 0, 14), torch.randn(14, 128), fresh=2)
        found.append((p[12:], runner.logits(p[12:])))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("name", CONFIGS)
def test_kernel_and_torch_modules_read_the_same_embedding(name: str, method: str) -> None:
    shape, found = BaseShape.of(CONFIGS[name]), []
    for decoder in (decoder_of(name), HFDecoder(model_of(CONFIGS[name]))):
        drafter: Any = spec.find(method).make_drafter(
            decoder, layer_of(method, shape), {"weights": "bf16"}
        )
        runner = drafter.runner
        runner.begin(decoder.new_cache(1, 16))
        torch.manual_seed(1)
        _, out = runner.step(list(range(9)), Rows.causal(0, 0, 9), torch.randn(9, 128), 2)
        found.append(out[-2:])  # of the others keys and values alone are of use
        assert len(found[-1]) == 2
    assert (found[0] - found[1]).norm() < 0.02 * found[1].norm()
