"""A model written as a GGUF file is read as the same model, with the same tokens."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from gguf import GGMLQuantizationType as Kind

from loading.gguf import tiny_files
from multirate.errors import Notice, UserError
from multirate.loading.gguf.file import GgufFile
from multirate.loading.gguf.load import load_gguf
from multirate.loading.gguf.writing.keys import ARCHITECTURES, check_config
from multirate.loading.gguf.writing.write import TYPES, check_output, requantise, write_model

SHAPE = {
    **{"vocab_size": len(tiny_files.TOKENS), "hidden_size": 64, "intermediate_size": 96},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 64, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None},
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
MORE = {
    "mistral": tf.MistralConfig(**SHAPE, head_dim=32, sliding_window=None),
    "qwen3_yarn": tf.Qwen3Config(
        **SHAPE, head_dim=32, rope_parameters=YARN | {"original_max_position_embeddings": 16}
    ),
    "llama_biased": tf.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "odd": tf.LlamaConfig(**SHAPE | {"hidden_size": 48, "intermediate_size": 80}),
}
NAMES = (*(name for name in tiny_files.NAMES if name not in ("mixtral", "qwen3moe")), *MORE)


def model_of(name: str) -> Any:
    """A random model, float32, with the generation config that loading gives."""
    if name in tiny_files.NAMES:
        model = tiny_files.tiny(name)
    else:
        torch.manual_seed(len(name))
        model = tf.AutoModelForCausalLM.from_config(MORE[name]).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def rounded(model: Any, dtype: torch.dtype) -> Any:
    """The model with parameters that `dtype` holds; Model.to would round rotary frequencies."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_gguf(tiny_files.write(tmp_path_factory.mktemp("t") / "t.gguf"))[1]


def write(
    model: Any, tokenizer: Any, out: Path, to: str = "bf16", progress: Any = lambda *_: None
) -> Path:
    write_model(model, tokenizer, "some/model", out, to, progress)
    return out


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(5, 200, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def test_every_model_type_that_is_written_is_tested() -> None:
    assert {model_of(name).config.model_type for name in NAMES} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("to", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_what_16_bits_hold_comes_back(
    name: str, to: str, dtype: torch.dtype, tokenizer: Any, tmp_path: Path
) -> None:
    original = rounded(model_of(name), dtype)
    model, _ = load_gguf(write(original, tokenizer, tmp_path / "m.gguf", to), torch.float32)
    assert model.config.tie_word_embeddings == original.config.tie_word_embeddings
    found, expected = dict(model.named_parameters()), dict(original.named_parameters())
    assert found.keys() == expected.keys()
    exact = not name.startswith("gemma")  # a norm's weight loses a bit when 1 is added to it
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0.0 if exact else 1e-6)
    torch.testing.assert_close(logits(model), logits(original), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("to", ["q8_0", "q4_0", "q4_1"])
def test_quantised_weights_are_a_step_away_at_most(
    name: str, to: str, tokenizer: Any, tmp_path: Path
) -> None:
    """The step of a block: the range of its 32 values over the numbers that its bits have."""
    original = model_of(name)
    path = write(original, tokenizer, tmp_path / "m.gguf", to)
    model, _ = load_gguf(path, torch.float32)
    kinds = {one.kind for one in GgufFile(path).tensors.values() if len(one.shape) > 1}
    plain = {Kind.F16} if name == "odd" else set()  # 48 and 80 inputs are not whole blocks
    assert kinds == (plain or {Kind.Q8_0, TYPES[to][0]})
    for key, value in dict(original.named_parameters()).items():
        found = model.get_parameter(key)
        if value.ndim == 1 or plain:
            torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-6)
            continue
        blocks, error = value.unflatten(-1, (-1, 32)), (found - value).unflatten(-1, (-1, 32))
        highest = blocks.abs().amax(-1)
        least, most = blocks.amin(-1), blocks.amax(-1)
        in_8_bits = to == "q8_0" or key in ("model.embed_tokens.weight", "lm_head.weight")
        # Q4_0 has no number for the value opposite to its largest one
        step = highest / 127 / 2 if in_8_bits else highest / 8
        step = (most - least) / 15 / 2 if to == "q4_1" and not in_8_bits else step
        assert (error.abs().amax(-1) <= step + highest * 2e-3).all(), key
    if to == "q8_0":
        change = (logits(model) - logits(original)).norm() / logits(original).norm()
        assert change < 0.05


def test_what_a_file_cannot_state_is_refused_and_leaves_nothing(
    tokenizer: Any, tmp_path: Path
) -> None:
    llama3 = tiny_files.configs()["llama3"][1].rope_parameters
    for config, words in (
        (tf.LlamaConfig(**SHAPE, hidden_act="gelu"), ("hidden_act", "'gelu'")),
        (tf.LlamaConfig(**SHAPE, rope_parameters=llama3 | {"low_freq_factor": 2.0}), ("rope",)),
        (tf.Qwen3Config(**SHAPE, rope_parameters=YARN | {"beta_fast": 16.0}), ("rope_par",)),
        (tf.Gemma2Config(**SHAPE, head_dim=32, query_pre_attn_scalar=7), ("query_pre",)),
        (
            tf.Gemma3TextConfig(
                **SHAPE,
                head_dim=32,
                query_pre_attn_scalar=32,
                layer_types=["sliding_attention", "full_attention"],  # files imply 5 and 1
            ),
            ("layer_types",),
        ),
        (tf.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1), ("'gpt2'", "llama, mistral")),
    ):
        with pytest.raises(UserError) as caught:
            write(tf.AutoModelForCausalLM.from_config(config), tokenizer, tmp_path / "m.gguf")
        assert all(word in str(caught.value) for word in words), caught.value
        assert not list(tmp_path.iterdir())
    broken = model_of("llama")
    for value, word in ((torch.nan, "not finite"), (1e5, "float16")):
        with torch.no_grad():
            broken.model.layers[1].mlp.up_proj.weight[3, 5] = value
        with pytest.raises(UserError, match=f"blk.1.ffn_up.weight holds values .*{word}"):
            write(broken, tokenizer, tmp_path / "m.gguf", "f16")
        assert not list(tmp_path.iterdir())


def test_a_window_that_is_lost_is_said(tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("multirate.errors._said", set())
    model = tf.AutoModelForCausalLM.from_config(tf.MistralConfig(**SHAPE, sliding_window=8))
    with pytest.warns(Notice, match="more than 8 tokens get other answers than from some/model"):
        write(model, tokenizer, tmp_path / "m.gguf")


def test_an_interrupted_run_changes_nothing(tokenizer: Any, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    out.write_bytes(b"before")

    def interrupted(done: int, total: int) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(model_of("llama"), tokenizer, out, progress=interrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    assert out.read_bytes() == b"before"


def test_where_it_may_be_written(tmp_path: Path) -> None:
    source, out = tmp_path / "a.gguf", tmp_path / "b.gguf"
    source.write_bytes(b"a")
    check_output(out, source, False)
    out.write_bytes(b"b")
    for path, force, words in (
        (out, False, "--force"),
        (source, True, "is the file to read"),
        (tmp_path / "b.bin", False, "must end in .gguf"),
        (tmp_path / "nowhere" / "b.gguf", False, "cannot write"),
    ):
        with pytest.raises(UserError, match=words):
            check_output(path, source, force)
    check_output(out, source, True)


@pytest.mark.parametrize("name", ["llama3", "gemma3", "mixtral", "qwen3moe"])
def test_another_file_keeps_what_is_not_a_matrix(name: str, tmp_path: Path) -> None:
    first = tiny_files.write(
        tmp_path / "f32.gguf", name, more={"general.note": "kept", "general.alignment": 32}
    )
    for to in ("bf16", "q8_0", "q4_1"):
        source, out = GgufFile(first), tmp_path / f"{to}.gguf"
        requantise(source, out, to, lambda *_: None)
        written = GgufFile(out)
        about = ("general.file_type", "general.quantization_version")
        del source.metadata["general.alignment"]  # where tensors lie is new
        for key, value in source.metadata.items():
            assert written.metadata[key] == value and written.kinds[key] == source.kinds[key]
        assert {*written.metadata} == {*source.metadata, *about}
        for tensor in source.tensors.values():
            copy = written.tensors[tensor.name]
            matrix = len(tensor.shape) > 1 and "ffn_gate_inp" not in tensor.name
            assert copy.shape == tensor.shape and (copy.kind == tensor.kind) != matrix
            if not matrix:
                assert (source.content(tensor.name) == written.content(tensor.name)).all()
        requantise(written, tmp_path / "again.gguf", to, lambda *_: None)
        assert (tmp_path / "again.gguf").read_bytes() == out.read_bytes()
        load_gguf(out)


def test_both_ways_give_one_file(tokenizer: Any, tmp_path: Path) -> None:
    """Quantising a model, and quantising the 16-bit file that it was written to."""
    model = model_of("qwen3").bfloat16()
    direct = GgufFile(write(model, tokenizer, tmp_path / "direct.gguf", "q4_0"))
    requantise(
        GgufFile(write(model, tokenizer, tmp_path / "b.gguf")), tmp_path / "r.gguf", "q4_0", print
    )
    after = GgufFile(tmp_path / "r.gguf")
    assert direct.metadata == after.metadata and [*direct.tensors] == [*after.tensors]
    for name in direct.tensors:
        assert np.array_equal(direct.content(name), after.content(name)), name


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_reads_it(name: str, tokenizer: Any, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    original = rounded(model_of(name), torch.bfloat16)
    path = write(original, tokenizer, tmp_path / "m.gguf", "f16")
    theirs = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False)
    text = "hello <|user|> é 12\n and a longer text, of more tokens than a window has"
    ids = tokenizer(text)["input_ids"]
    assert theirs.tokenize(text.encode(), add_bos=True, special=True) == ids
    if name == "phi3":  # llama.cpp has no windows for it
        ids = ids[: tiny_files.WINDOW]
    theirs.eval(ids)
    with torch.no_grad():
        expected = original(torch.tensor([ids])).logits[0]
    found = torch.from_numpy(np.array(theirs.scores[: len(ids)]))
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_configs_are_compared_by_value() -> None:
    config = tiny_files.configs()["llama"][1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_config(config, config, "m")
    for field, value in (("rms_norm_eps", 2e-5), ("intermediate_size", 65), ("mlp_bias", True)):
        other = tf.LlamaConfig(**{**config.to_dict(), field: value})
        with pytest.raises(UserError, match=field):
            check_config(config, other, "m")
