"""Which models are taken, which are refused and with what words."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tf

from multirate.errors import UserError
from multirate.runtime import load
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.hf.inspect import find_parts
from multirate.runtime.load import load_decoder
from multirate.runtime.rows import Rows

from .tiny_models import MAX_POSITIONS, VOCAB, prompts, tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def refused() -> dict[str, tuple[Any, str]]:
    return {
        "t5": (
            lambda: tf.T5ForConditionalGeneration(
                tf.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
            ),
            "encoder-decoder",
        ),
        "mamba": (
            lambda: tf.MambaForCausalLM(
                tf.MambaConfig(vocab_size=50, hidden_size=16, state_size=4, num_hidden_layers=2)
            ),
            "0 attention blocks.*MambaMixer",
        ),
        "no head": (lambda: tf.LlamaModel(tf.LlamaConfig(**SMALL)), "no language-model head"),
        "bloom": (
            lambda: tf.BloomForCausalLM(
                tf.BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2)
            ),
            "ln_f.*second norm",
        ),
        "not transformers": (lambda: torch.nn.Linear(2, 2), "not a transformers model"),
        "linear attention": (
            lambda: tf.Qwen3NextForCausalLM(
                tf.Qwen3NextConfig(
                    **SMALL,
                    head_dim=8,
                    num_experts=4,
                    num_experts_per_tok=2,
                    moe_intermediate_size=16,
                    shared_expert_intermediate_size=16,
                    linear_num_value_heads=2,
                    linear_num_key_heads=2,
                    linear_key_head_dim=8,
                    linear_value_head_dim=8,
                )
            ),
            "attention",
        ),
    }


@pytest.mark.parametrize("case", refused())
def test_models_that_cannot_run_are_refused_with_the_reason(case: str) -> None:
    build, reason = refused()[case]
    model = build()
    with pytest.raises(UserError, match=reason) as error:
        load_decoder(model, "hf")
    assert type(model).__name__ in str(error.value)


def test_bidirectional_attention_is_refused() -> None:
    config = tf.Gemma3TextConfig(**SMALL, head_dim=8, use_bidirectional_attention=True)
    with pytest.raises(UserError, match="bidirectional"):
        find_parts(tf.Gemma3ForCausalLM(config))


def test_a_part_that_structure_cannot_show_is_caught_by_the_probe() -> None:
    """A forward that does other things than its configuration says: refused instead of decoded
    wrongly.
    """
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, final_logit_softcapping=0.01))
    with pytest.raises(UserError, match="other logits than its own forward"):
        load_decoder(model, "hf")


@pytest.mark.parametrize(
    "build",
    [
        lambda: tf.GraniteForCausalLM(
            tf.GraniteConfig(
                **SMALL,
                embedding_multiplier=3.0,
                logits_scaling=2.0,
                residual_multiplier=0.5,
                attention_multiplier=0.2,
            )
        ),
        lambda: tf.CohereForCausalLM(tf.CohereConfig(**SMALL, logit_scale=0.5)),
        lambda: tf.GPTNeoXForCausalLM(
            tf.GPTNeoXConfig(
                vocab_size=50,
                hidden_size=32,
                intermediate_size=40,
                num_hidden_layers=2,
                num_attention_heads=4,
            )
        ),
        lambda: tf.SmolLM3ForCausalLM(
            tf.SmolLM3Config(**SMALL, pad_token_id=0, no_rope_layers=[1, 0])
        ),
        lambda: tf.StableLmForCausalLM(tf.StableLmConfig(**SMALL)),
        lambda: tf.DeepseekV3ForCausalLM(
            tf.DeepseekV3Config(
                **{**SMALL, "num_key_value_heads": 4},
                q_lora_rank=8,
                kv_lora_rank=8,
                qk_rope_head_dim=4,
                v_head_dim=8,
                qk_nope_head_dim=6,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                first_k_dense_replace=1,
                moe_intermediate_size=16,
                n_shared_experts=1,
            )
        ),
    ],
    ids=["granite", "cohere", "gpt_neox", "smollm3", "stablelm", "deepseek_v3"],
)
@torch.no_grad()
def test_architectures_nobody_named_run_too(build: Any) -> None:
    """Structure, not a list of names: scales, parallel residuals, no-rotary layers, keys wider than
    values.
    """
    torch.manual_seed(0)
    model = build().eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    decoder = load_decoder(model, "hf")
    ids = prompts(9)[0] % 50
    cache, total = decoder.new_cache(1, 16), decoder.info.num_layers
    out = []
    for start, stop in ((0, 5), (5, 9)):
        rows = Rows.causal(0, start, stop - start)
        out.append(
            decoder.logits(
                decoder.layers(decoder.embed(ids[start:stop], rows.pos), rows, 0, total, cache)
            )
        )
    torch.testing.assert_close(torch.cat(out), model(ids[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_facts() -> None:
    info = HFDecoder(tiny_model("llama")).info
    assert (info.architecture, info.num_layers, info.hidden_size, info.vocab_size) == (
        "llama",
        3,
        32,
        VOCAB,
    )
    assert info.max_positions == MAX_POSITIONS and info.tied_head and info.dtype == torch.float32
    assert not HFDecoder(tiny_model("mistral")).info.tied_head
    assert HFDecoder(tiny_model("gpt2")).info.max_positions == MAX_POSITIONS


def test_positions_stop_where_the_rotary_frequencies_change() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }
    config = tf.Phi3Config(
        **SMALL,
        pad_token_id=0,
        max_position_embeddings=64,
        original_max_position_embeddings=32,
        rope_parameters=rope,
    )
    assert HFDecoder(tf.Phi3ForCausalLM(config)).info.max_positions == 32


def test_attention_that_ignores_masks_is_replaced_for_the_call_only() -> None:
    model, decoder = tiny_model("llama"), HFDecoder(tiny_model("llama"))
    (ids,), rows = prompts(6), Rows.causal(0, 0, 6)
    expected = decoder.layers(decoder.embed(ids, rows.pos), rows, 0, 3, decoder.new_cache(1, 8))
    before = model.config._attn_implementation
    try:
        for implementation in ("flex_attention", "eager"):
            model.config._attn_implementation = implementation
            got = decoder.layers(decoder.embed(ids, rows.pos), rows, 0, 3, decoder.new_cache(1, 8))
            assert model.config._attn_implementation == implementation
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    finally:
        model.config._attn_implementation = before


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_bfloat16_equals_the_models_own_forward(name: str) -> None:
    config = tiny_model(name).config
    model = tf.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    decoder, (ids,), rows = HFDecoder(model), prompts(9), Rows.causal(0, 0, 9)
    cache = decoder.new_cache(1, 16)
    assert decoder.info.dtype == torch.bfloat16 and cache.keys[0].dtype == torch.bfloat16
    got = decoder.logits(decoder.layers(decoder.embed(ids, rows.pos), rows, 0, 3, cache))
    expected = model(ids[None]).logits[0].float()
    assert got.dtype == torch.float32
    assert (got - expected).norm() / expected.norm() < 2e-2


@pytest.mark.parametrize("backend", ["native", "hf"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_no_numbers_are_refused(backend: str, value: float) -> None:
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)).bfloat16().eval()
    model.model.embed_tokens.weight.data[49, 3] = value  # of a token that no probe reads
    with pytest.raises(UserError, match=r"weight model.embed_tokens.weight holds .* not finite"):
        load_decoder(model, backend)


def test_weights_whose_sum_is_beyond_their_dtype_are_taken() -> None:
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)).half().eval()
    model.model.norm.weight.data.fill_(2100)
    assert not model.model.norm.weight.sum().isfinite()
    assert load_decoder(model, "hf").info.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_whose_logits_overflow_is_refused_in_its_own_words(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data.fill_(1e38)
        layer.mlp.down_proj.weight.data.fill_(1e38)
    with pytest.raises(UserError, match="logits are not finite numbers"):
        load_decoder(model)


def test_unknown_backend_names_what_is_accepted() -> None:
    with pytest.raises(UserError, match="backend='fast' is unknown; accepted: auto, hf, native"):
        load_decoder(tiny_model("llama"), "fast")


def test_backends_are_chosen_by_what_native_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto falls back with no word, native says why not; the answer comes from
    `NativeDecoder.supports`.
    """

    class Picky(HFDecoder):
        @staticmethod
        def supports(model: Any) -> str | None:
            return None if model.config.model_type == "llama" else "its layers are not Llama-like"

    monkeypatch.setattr(load, "NativeDecoder", Picky)
    assert type(load_decoder(tiny_model("llama"))) is Picky
    assert type(load_decoder(tiny_model("llama"), "native")) is Picky
    assert type(load_decoder(tiny_model("gpt2"))) is HFDecoder
    with pytest.raises(UserError, match=r"native.*not Llama-like"):
        load_decoder(tiny_model("gpt2"), "native")
