"""A GGUF file's model computes what the model it was written from computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from loading.gguf import tiny_files
from multirate.errors import Notice, UserError
from multirate.loading.gguf.load import load_gguf
from multirate.runtime.load import why_not_native

READ_BY_TRANSFORMERS = ("llama", "llama_untied", "qwen2", "phi3", "gemma2")
"""Where its own table of keys says all that there is to know of our tiny models."""


@pytest.mark.parametrize("name", tiny_files.NAMES)
def test_logits_are_the_original_models(name: str, tmp_path: Path) -> None:
    original = tiny_files.tiny(name)
    model, _ = load_gguf(tiny_files.write(tmp_path / "m.gguf", name), torch.float32)
    assert type(model) is type(original) and not model.training
    ids = torch.randint(5, 200, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-4)
    expected = dict(original.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    exact = not name.startswith("gemma")  # a norm's weight loses a bit when 1 is added to it
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0.0 if exact else 1e-6)


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0])
def test_weights_are_those_that_transformers_dequantises(
    name: str, kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    path = tiny_files.write(tmp_path / "m.gguf", name, kind)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    ours, _ = load_gguf(path)
    expected, found = theirs.state_dict(), ours.state_dict()
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, expected[key]), key


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_kernel_takes_it(name: str, tmp_path: Path) -> None:
    model, _ = load_gguf(tiny_files.write(tmp_path / "m.gguf", name, GGMLQuantizationType.Q8_0))
    reason = why_not_native(model)
    assert reason is None or "kernel" in reason or "MULTIRATE_NATIVE" in reason, reason


def test_tokenizer_template_and_ends_are_the_files(tmp_path: Path) -> None:
    path = tiny_files.write(tmp_path / "m.gguf")
    model, tokenizer = load_gguf(path)
    ids = tokenizer("hello <|user|> é\n")["input_ids"]
    assert tokenizer.decode(ids) == "hello <|user|> é\n"
    assert ids[:2] == [tiny_files.TOKENS.index("he"), tiny_files.TOKENS.index("ll")] and 2 in ids
    assert (
        ids
        == AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)("hello <|user|> é\n")[
            "input_ids"
        ]
    )
    assert tokenizer.chat_template == tiny_files.TEMPLATE and tokenizer.eos_token == "<eos>"
    assert model.generation_config.eos_token_id == [1, 4]  # of the text, and of a turn
    assert model.config.pad_token_id == 0 and model.config.bos_token_id is None


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def refused(*words: str) -> None:
        with pytest.raises(UserError) as caught:
            load_gguf(path)
        assert all(word in str(caught.value) for word in (str(path), *words)), caught.value

    tiny_files.write(path, architecture="mamba")
    refused("'mamba'", "accepted", "llama", "qwen3")
    tiny_files.write(path, leave_out=("blk.1.ffn_up.weight",))
    refused("no tensor blk.1.ffn_up.weight", "mlp.up_proj")
    tiny_files.write(path, tensors={"blk.0.surprise.weight": np.ones((4, 32), np.float32)})
    refused("no place for tensor blk.0.surprise.weight")
    tiny_files.write(path, more={"llama.rope.scaling.type": "spiral"})
    refused("rope.scaling.type is 'spiral'", "yarn")
    tiny_files.write(path, tensors={"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)})
    refused("rope_freqs.weight does not follow Llama 3's")
    tiny_files.write(path, leave_out=("token_embd.weight",))
    refused("are too few for a model of 2 layers")
    tiny_files.write(path, more={"split.count": 3})
    refused("one of 3 parts", "--merge")
    broken = tiny_files.tiny("llama")
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[3, 5] = torch.inf
    tiny_files.write(path, model=broken)
    refused("blk.1.ffn_up.weight", "not finite")


def test_a_quantisation_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    path = tiny_files.write(tmp_path / "m.gguf", kind=GGMLQuantizationType.Q8_0)
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 2 * 8
    assert data[at] == GGMLQuantizationType.Q8_0
    for number, words in (
        (GGMLQuantizationType.I8, ("blk.0.ffn_up.weight", "I8", "Q4_K")),
        (77, ("blk.0.ffn_up.weight", "number 77")),
    ):
        data[at] = int(number)
        path.write_bytes(data)
        with pytest.raises(UserError) as caught:
            load_gguf(path)
        assert all(word in str(caught.value) for word in words), caught.value


def test_keys_that_are_not_understood_are_said(tmp_path: Path) -> None:
    path = tiny_files.write(tmp_path / "new.gguf", more={"llama.attention.swirl": 3})
    with pytest.warns(Notice, match=r"new.gguf: ignoring the unknown field llama.attention.swirl"):
        load_gguf(path)
