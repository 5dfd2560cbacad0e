"""Tiny mixtures with their experts on disk, for the native kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from native_kernel import skip_without_kernel

from multirate.experts.model import OffloadedExperts, load_without_experts
from multirate.experts.pack import pack
from multirate.experts.store import ExpertStore
from multirate.methods._shared.shape import BaseShape
from multirate.methods.m2r2_experts.config import ExpertPredictorConfig
from multirate.methods.m2r2_experts.modules import ExpertPredictor
from multirate.runtime.native.moe import NativeMoEDecoder

SHAPE: dict[str, Any] = dict(
    vocab_size=61,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    max_position_embeddings=96,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    initializer_range=0.15,
)
CONFIGS = {
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **SHAPE,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen3_moe_raw": lambda: tf.Qwen3MoeConfig(
        **SHAPE,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=False,
    ),
    "mixtral": lambda: tf.MixtralConfig(
        **SHAPE, intermediate_size=64, num_local_experts=5, num_experts_per_tok=2
    ),
    "olmoe": lambda: tf.OlmoeConfig(
        **{**SHAPE, "head_dim": 32, "num_key_value_heads": 2},
        intermediate_size=32,
        num_experts=6,
        num_experts_per_tok=3,
    ),
    "mellum": lambda: tf.MellumConfig(
        **SHAPE,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=6,
        num_experts_per_tok=2,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"] * 2,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def mixture(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    original = (
        tf.AutoModelForCausalLM.from_config(CONFIGS[request.param]()).eval().to(torch.bfloat16)
    )
    original.save_pretrained(folder)
    index = pack(folder, folder / "store")
    model = load_without_experts(folder)
    skip_without_kernel()
    assert NativeMoEDecoder.supports(model) is None
    assert index.layout == "native"
    offload = OffloadedExperts(model, ExpertStore.open(folder / "store"))
    shape = BaseShape.of(model.config)
    predictor = ExpertPredictor(ExpertPredictorConfig.for_base(shape, rank=8), shape)
    with torch.no_grad():
        predictor.up[0].normal_(0, 0.3)  # it predicts others than the gate does
    offload.trained_predictor = predictor
    offload.use()
    decoder = offload.decoder()
    assert isinstance(decoder, NativeMoEDecoder)
    yield original, offload, decoder
    offload.remove()
