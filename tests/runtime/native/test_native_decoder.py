"""The kernel against transformers, and its own guarantee: a row's bits do not depend on its
company.
"""

from __future__ import annotations

import statistics
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    CwmConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GraniteConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    InternLM3Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Ministral3Config,
    MinistralConfig,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PixtralVisionConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from multirate.errors import Notice, UserError
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.load import load_decoder
from multirate.runtime.native import NativeDecoder
from multirate.runtime.native.cache import from_native
from multirate.runtime.native.packing import packed_bytes
from multirate.runtime.rows import Rows

SIZES = dict(
    vocab_size=133,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, head_dim=32),
    "llama3-rope": LlamaConfig(
        **SIZES,
        head_dim=64,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral-window": MistralConfig(**SIZES, head_dim=32, sliding_window=24),
    "qwen2-bias": Qwen2Config(**SIZES),
    "qwen3-norms": Qwen3Config(**SIZES, head_dim=64),
    "mha-head-80": LlamaConfig(
        **{**SIZES, "hidden_size": 320, "num_key_value_heads": 4}, head_dim=80
    ),
    "gemma": GemmaConfig(**SIZES, head_dim=32),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        head_dim=64,
        query_pre_attn_scalar=50,
        sliding_window=24,
        layer_types=MIXED,
    ),
    "granite": GraniteConfig(
        **SIZES,
        embedding_multiplier=12.0,
        attention_multiplier=0.05,
        residual_multiplier=0.22,
        logits_scaling=8.0,
        attention_bias=True,
    ),
    "olmo2": Olmo2Config(**SIZES),
    "olmo2-biases": Olmo2Config(**SIZES, attention_bias=True),
    "olmo3": Olmo3Config(
        **SIZES,
        sliding_window=24,
        layer_types=MIXED,
    ),
    "phi3": Phi3Config(**SIZES, pad_token_id=0),
    "phi3-partly-rotated": Phi3Config(
        **{**SIZES, "hidden_size": 256},
        pad_token_id=0,
        sliding_window=24,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0 + 0.1 * i for i in range(24)],
            "long_factor": [4.0 + 0.1 * i for i in range(24)],
            "original_max_position_embeddings": 128,
        },
    ),
    "llama-biases": LlamaConfig(**SIZES, head_dim=32, attention_bias=True),
    "cwm": CwmConfig(
        **SIZES,
        head_dim=32,
        sliding_window=24,
        layer_types=MIXED,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "ernie": Ernie4_5Config(**SIZES, head_dim=32),
    "exaone4": Exaone4Config(**SIZES, sliding_window=24, sliding_window_pattern=3),
    "exaone4-no-windows": Exaone4Config(
        **SIZES, sliding_window=None, layer_types=["full_attention"] * 3
    ),
    "glm": GlmConfig(**SIZES, head_dim=32, pad_token_id=0, attention_bias=True),
    "glm4": Glm4Config(**SIZES, head_dim=64, pad_token_id=0, attention_bias=True),
    "helium": HeliumConfig(**SIZES, head_dim=32),
    "hunyuan": HunYuanDenseV1Config(
        **SIZES,
        head_dim=32,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1e3, "factor": 1.0},
    ),
    "internlm3": InternLM3Config(**SIZES, head_dim=32),
    "ministral": MinistralConfig(
        **SIZES,
        head_dim=32,
        sliding_window=24,
        layer_types=MIXED,
    ),
    "ministral3": Ministral3Config(
        **SIZES,
        head_dim=32,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "seed-oss": SeedOssConfig(**SIZES, head_dim=32, attention_bias=True),
    "smollm3": SmolLM3Config(**SIZES, pad_token_id=0, no_rope_layers=[1, 0, 1]),
}


def make(name: str, seed: int | None = None):
    torch.manual_seed(zlib.crc32(name.encode()) if seed is None else seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        for parameter in (
            model.parameters()
        ):  # norms and biases away from their neutral values, logits spread out
            parameter.mul_(1.5).add_(torch.randn_like(parameter) * 0.05)
    return model.to(torch.bfloat16)


def run(decoder, tokens, start: int, cache, stops=None):
    rows = Rows.causal(0, start, len(tokens))
    x = decoder.embed(torch.tensor(tokens), rows.pos)
    for low, high in zip(
        [0, *(stops or [])], [*(stops or []), decoder.info.num_layers], strict=True
    ):
        x = decoder.layers(x, rows, low, high, cache)
    return decoder.logits(x)


def distances_from_fp32(model):
    """Of the kernel's logits of 71 tokens and of the model's own in bf16, which becomes fp32; and
    the logits' size.
    """
    tokens = torch.randint(0, 133, (1, 71))
    decoder = load_decoder(model)
    assert isinstance(decoder, NativeDecoder)
    ours = run(decoder, tokens[0].tolist(), 0, decoder.new_cache(1, 80))
    with torch.no_grad():
        low = model(tokens).logits[0].float()
        exact = model.float()(tokens).logits[0]
    return (ours - exact).norm(), (low - exact).norm(), exact.norm()


@pytest.mark.parametrize("name", CONFIGS)
def test_closer_to_fp32_than_transformers_in_bf16(name):
    ours, theirs, size = distances_from_fp32(make(name))
    assert ours < 1.05 * theirs < 0.2 * size


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "glm4", "granite", "hunyuan", "olmo2", "phi3", "smollm3"]
)
def test_channels_hundreds_of_times_the_others_cost_no_more_than_transformers_rounding(
    name, monkeypatch
):
    """As real models have them, Gemma above all. Of some such models either rounding leaves little,
    so that what is asked is the median of five.
    """
    monkeypatch.setattr(NativeDecoder, "probes", False)
    ratios = []
    for seed in range(5):
        model = make(name, seed)
        with torch.no_grad():
            for part, parameter in model.named_parameters():
                if "norm" in part and "self_attn" not in part:
                    channels = torch.randperm(len(parameter))[:3]
                    parameter[channels] = 300 * (parameter[channels] + 1)
            model.get_input_embeddings().weight[:, :2] *= 300
        ours, theirs, _ = distances_from_fp32(model)
        ratios.append(float(ours / theirs))
    assert statistics.median(ratios) < 1.2  # some builds have rows of bf16, too


def test_where_memory_is_short_the_models_own_layers_are_run(monkeypatch):
    model = make("llama")
    place = "multirate.runtime.native.supported.free_memory"
    monkeypatch.setattr(place, lambda: 10_000)
    with pytest.raises(UserError, match=r"native.*needs .* GB of memory, but only 0.0 GB are free"):
        load_decoder(model, "native")
    with pytest.warns(Notice, match="running the model's own layers"):
        assert isinstance(load_decoder(model), HFDecoder)
    for told in (None, 10**9):  # not told, or enough
        monkeypatch.setattr(
            "multirate.runtime.native.supported.free_memory", lambda told=told: told
        )
        assert isinstance(load_decoder(model), NativeDecoder)


def test_what_packing_is_said_to_take_is_what_it_takes():
    model = make("llama")
    head, others = model.lm_head.weight.numel(), sum(p.numel() for p in model.parameters())
    owner = NativeDecoder(model)._owner
    taken = sum(t.numel() * t.element_size() for t in owner.tensors if t.dtype == torch.uint8)
    assert 0.7 * taken < packed_bytes(others, head) < 1.5 * taken  # the embedding is not packed


VISION = dict(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
READS_IMAGES = {
    "gemma3": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=CONFIGS["gemma3"], vision_config=VISION)
    ),
    "llava": lambda: LlavaForConditionalGeneration(
        LlavaConfig(text_config=CONFIGS["llama"], vision_config=CLIPVisionConfig(**VISION))
    ),
    "mistral3": lambda: Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config=CONFIGS["ministral3"], vision_config=PixtralVisionConfig(**VISION)
        )
    ),
    "smolvlm": lambda: SmolVLMForConditionalGeneration(
        SmolVLMConfig(text_config=CONFIGS["llama"], vision_config=VISION)
    ),
}


@pytest.mark.parametrize("name", READS_IMAGES)
def test_the_language_model_of_one_that_reads_images_is_packed(name):
    torch.manual_seed(0)
    model = READS_IMAGES[name]().eval().to(torch.bfloat16)
    ours, _, size = distances_from_fp32(model)
    assert ours < 0.05 * size
    model.to(torch.bfloat16).model.register_forward_hook(lambda module, inputs, output: output)
    with pytest.raises(UserError, match="Model has a forward hook"):  # which no layer would call
        load_decoder(model)


def test_a_part_that_is_not_known_is_noticed(monkeypatch):
    """As where another release of transformers computes otherwise."""
    model = make("gemma3")
    monkeypatch.setattr("multirate.runtime.native.packed_model.embed_scale", lambda parts: 1.0)
    with pytest.raises(UserError, match=r"native.*differ from the model's own by .*% of"):
        load_decoder(model, "native")
    with pytest.warns(Notice, match=r"running the model's own layers.*an unknown part"):
        assert isinstance(load_decoder(model), HFDecoder)


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_are_bit_identical_alone_together_and_split(name):
    decoder = NativeDecoder(make(name))
    tokens = torch.randint(0, 133, (61,)).tolist()
    together = run(decoder, tokens, 0, decoder.new_cache(1, 64))
    cache = decoder.new_cache(1, 16)  # grows
    alone = torch.cat([run(decoder, [t], i, cache) for i, t in enumerate(tokens)])
    assert torch.equal(together, alone)
    assert torch.equal(together, run(decoder, tokens, 0, decoder.new_cache(1, 64), stops=[1, 2]))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_bits(threads):
    decoder = NativeDecoder(make("llama"))
    tokens = list(range(20))
    one = run(decoder, tokens, 0, decoder.new_cache(1, 32))
    decoder.workspace.set_threads(threads, fixed=True)
    assert torch.equal(one, run(decoder, tokens, 0, decoder.new_cache(1, 32)))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "mha-head-80"])
@pytest.mark.parametrize("seed", range(3))
def test_tree_nodes_equal_their_path_as_a_chain_bit_for_bit(name, seed):
    rng = np.random.default_rng(seed)
    decoder = NativeDecoder(make(name))
    prompt = rng.integers(0, 133, 5 + 17 * seed).tolist()
    nodes = 14
    parents = [int(rng.integers(max(0, i - 4), i + 1)) for i in range(nodes)]
    tokens = rng.integers(0, 133, nodes + 1).tolist()
    cache = decoder.new_cache(1, 96)
    run(decoder, prompt, 0, cache)
    cache.commit(0, len(prompt))
    rows = Rows.draft_tree(0, len(prompt), parents)
    tree = decoder.logits(
        decoder.layers(
            decoder.embed(torch.tensor(tokens), rows.pos), rows, 0, decoder.info.num_layers, cache
        )
    )
    for node in range(nodes + 1):
        path = [node]
        while path[0] != 0:
            path.insert(0, parents[path[0] - 1])
        alone = run(decoder, prompt + [tokens[i] for i in path], 0, decoder.new_cache(1, 96))[
            len(prompt) :
        ]
        assert torch.equal(tree[path], alone)
    path = [int(np.argmax(rows.pos))]
    while path[0] != 0:
        path.insert(0, parents[path[0] - 1])
    other = decoder.new_cache(1, 96)
    chain = run(decoder, prompt + [tokens[i] for i in path], 0, other)[len(prompt) :]
    assert torch.equal(tree[path], chain)
    cache.keep(0, [len(prompt) + i for i in path])
    total = len(prompt) + len(path)
    for layer in range(decoder.info.num_layers):
        for mine, fresh in zip(cache.standard(layer), other.standard(layer), strict=True):
            assert torch.equal(mine[:, :, :total], fresh[:, :, :total])


def test_trees_of_several_sequences_and_prompts_share_a_pass():
    """Attention reads a K/V block once for neighbouring rows: of one sequence only, each up to its
    own end.
    """
    rng = np.random.default_rng(0)
    decoder = NativeDecoder(make("llama"))
    prompts = [rng.integers(0, 133, n).tolist() for n in (30, 3, 17)]
    cache = decoder.new_cache(3, 96)
    alone, parts, ids = [], [], []
    for b, prompt in enumerate(prompts):
        own = decoder.new_cache(1, 96)
        for seq, store in ((b, cache), (0, own)):
            rows = Rows.causal(seq, 0, len(prompt))
            decoder.layers(decoder.embed(torch.tensor(prompt), rows.pos), rows, 0, 3, store)
        tree = Rows.draft_tree(b, len(prompt), [0, 0, 1, 2, 3])
        tokens = rng.integers(0, 133, 6).tolist()
        single = Rows.draft_tree(0, len(prompt), [0, 0, 1, 2, 3])
        alone.append(
            decoder.layers(decoder.embed(torch.tensor(tokens), single.pos), single, 0, 3, own)
        )
        parts.append(tree)
        ids += tokens
    rows = Rows.concat(parts)
    together = decoder.layers(decoder.embed(torch.tensor(ids), rows.pos), rows, 0, 3, cache)
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("start", [0, 2])
def test_a_greedy_pass_is_embed_layers_and_logits(start):
    decoder = NativeDecoder(make("qwen2-bias"))
    tokens = list(range(20, 31))
    rows = Rows.causal(0, 0, len(tokens))
    one, other = decoder.new_cache(1, 32), decoder.new_cache(1, 32)
    x = decoder.embed(torch.tensor(tokens), rows.pos)
    entering = decoder.layers(x, rows, 0, start, one)
    decoder.layers(x, rows, 0, start, other)
    hidden = decoder.layers(entering, rows, start, 3, one)
    ids, residuals = (tokens, None) if start == 0 else (None, entering)
    before = None if residuals is None else residuals.clone()
    found, chosen = decoder.next_tokens(rows, other, ids, residuals, start)
    assert torch.equal(found, hidden)
    assert chosen == decoder.logits(hidden).argmax(-1).tolist()
    assert before is None or torch.equal(residuals, before)


def test_batch_rows_equal_single_sequences():
    decoder = NativeDecoder(make("qwen3-norms"))
    prompts = [list(range(3)), list(range(40, 59)), [7]]
    rows = Rows.concat([Rows.causal(b, 0, len(p)) for b, p in enumerate(prompts)])
    x = decoder.embed(torch.tensor([token for prompt in prompts for token in prompt]), rows.pos)
    together = decoder.logits(decoder.layers(x, rows, 0, 3, decoder.new_cache(3, 32)))
    parts = torch.cat([run(decoder, p, 0, decoder.new_cache(1, 32)) for p in prompts])
    assert torch.equal(together, parts)


@pytest.mark.parametrize("mlp", ["lora", "parallel"])
def test_accelerated_rows_match_the_generic_decoder_and_leave_slow_rows_alone(mlp):
    from multirate.methods._shared.shape import BaseShape
    from multirate.methods.m2r2.config import M2R2Config
    from multirate.methods.m2r2.modules import AcceleratedStream

    model = make("llama")
    base = BaseShape.of(model.config)
    stream = AcceleratedStream(
        M2R2Config.for_base(base, "m2r2-carry", gates=(2,), rank=24, mlp_adapter=mlp), base
    )
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    tokens = torch.arange(30, 41)
    slow, fast = Rows.causal(0, 0, 11), Rows.accelerated_at(0, np.arange(11))
    both = Rows.concat([slow, fast])
    exact_model = make("llama").float()
    out = []
    for decoder in (NativeDecoder(model), HFDecoder(exact_model)):
        cache = decoder.new_cache(1, 32)
        x = decoder.embed(torch.cat([tokens, tokens]), both.pos)
        y = decoder.layers(x, both, 0, 2, cache, stream.layer_adapters())
        out.append(y)
        plain = decoder.layers(x[:11], slow, 0, 2, decoder.new_cache(1, 32))
        assert torch.allclose(y[:11], plain, atol=1e-5)
        if isinstance(decoder, NativeDecoder):
            assert torch.equal(y[:11], plain)
        assert not torch.allclose(y[11:], plain, atol=1e-2)
    assert (out[0] - out[1]).norm() < 0.02 * out[1].norm()


def test_a_released_cache_comes_back_as_new():
    """Also after a generation that left NaN behind: a hidden slot of weight 0 must not turn it into
    one of its own.
    """
    decoder = NativeDecoder(make("llama"))
    tokens = torch.randint(0, 133, (21,)).tolist()
    expected = run(decoder, tokens, 0, decoder.new_cache(1, 40))
    used = decoder.new_cache(1, 64)
    run(decoder, tokens, 0, used)
    used.commit(0, 21)
    for keys, values in zip(used.keys, used.values, strict=True):
        keys.fill_(float("nan"))
        values.fill_(float("nan"))
    decoder.release_cache(used)
    again = decoder.new_cache(1, 40)
    assert again is used
    assert again.lengths == [0]
    assert torch.equal(run(decoder, tokens, 0, again), expected)
    assert decoder.new_cache(1, 40) is not again  # one owner at a time
    decoder.release_cache(again)
    assert decoder.new_cache(2, 40) is not again  # another batch


def test_layout_round_trip():
    keys, values = torch.randn(2, 3, 32, 16), torch.randn(2, 3, 32, 16)
    native_keys = keys.unflatten(-1, (-1, 2)).unflatten(2, (-1, 16)).transpose(3, 4)
    native_values = values.unflatten(2, (-1, 2)).transpose(3, 4)
    k, v = from_native(native_keys.contiguous(), native_values.contiguous())
    assert torch.equal(k, keys) and torch.equal(v, values)


def test_refusals_name_the_reason():
    gpt = AutoModelForCausalLM.from_config(
        GPT2Config(n_layer=1, n_embd=64, n_head=1, vocab_size=50)
    )
    assert "gpt2" in str(NativeDecoder.supports(gpt))
    assert "float32" in str(NativeDecoder.supports(make("llama").float()))
    with pytest.raises(UserError, match="gpt2"):
        load_decoder(gpt, backend="native")


def test_missing_compiler_is_a_reason_not_a_crash(monkeypatch):
    monkeypatch.setenv("MULTIRATE_NATIVE", "0")
    assert "MULTIRATE_NATIVE=0" in str(NativeDecoder.supports(make("llama")))
    assert isinstance(load_decoder(make("llama")), HFDecoder)


def test_the_whole_context_is_run():
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": 131072}, head_dim=32)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    decoder = load_decoder(model)
    assert isinstance(decoder, NativeDecoder) and decoder.info.max_positions == 131072
    tokens = torch.randint(0, 133, (3,))
    causal = Rows.causal(0, 0, 3)
    # no row sees another position but the last three
    rows = replace(causal, pos=causal.pos + np.int32(131072 - 3))
    cache = decoder.new_cache(1, 16)
    ours = decoder.logits(decoder.layers(decoder.embed(tokens, rows.pos), rows, 0, 3, cache))
    with torch.no_grad():
        exact = model.float()(
            tokens[None], position_ids=torch.from_numpy(rows.pos.astype(np.int64))[None]
        ).logits[0]
    assert (ours - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("count", [1, 7, 130])
def test_filled_keys_and_values_have_the_bits_that_layers_write(name: str, count: int) -> None:
    decoder = load_decoder(make(name), "native")
    expected, got = decoder.new_cache(2, 8), decoder.new_cache(2, 8)
    rows = Rows.concat([Rows.causal(0, 3, count), Rows.causal(1, 0, 2)])
    torch.manual_seed(count)
    hidden = torch.randn(len(rows), decoder.info.hidden_size)
    kept = hidden.clone()
    for layer in (1, 2):
        decoder.layers(hidden, rows, layer, layer + 1, expected)
    decoder.fill_kv(rows, hidden, 1, 3, got)
    assert torch.equal(hidden, kept)
    for layer in range(3):
        for ours, theirs in zip(got.standard(layer), expected.standard(layer), strict=True):
            assert torch.equal(ours, theirs)
    assert got.standard(2)[0][0, :, 3 : 3 + count].any()


def test_head_without_the_norm_and_the_likeliest_tokens() -> None:
    decoder = load_decoder(make("llama"), "native")
    x = torch.randn(5, decoder.info.hidden_size)
    logits = decoder.logits(x)
    torch.testing.assert_close(decoder.unembed(decoder.norm(x)), logits, atol=0.05, rtol=0.01)
    assert decoder.top_tokens(logits, 4) == logits.topk(4).indices.tolist()
