"""Weights that stay in a GGUF file: read in the rows that the model has, run, or expanded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from native_kernel import skip_without_kernel

import multirate
from loading.gguf import tiny_files
from multirate.decoding.logits import SamplingSettings
from multirate.errors import Notice, UserError
from multirate.loading.gguf.file import GgufFile
from multirate.loading.gguf.load import load_gguf
from multirate.loading.gguf.weights import _row_order, weight_in_file
from multirate.loading.hub import load_model
from multirate.runtime.hf.decoder import relative_difference
from multirate.runtime.load import load_decoder
from multirate.runtime.native import NativeDecoder
from multirate.runtime.quantised import (
    BLOCKS,
    FLOATS,
    QuantisedWeight,
    dequantised,
    expanded,
    formats,
    quantised_weights,
    weight_bytes,
    weight_of,
)
from multirate.runtime.rows import Rows
from multirate.training.fingerprint import fingerprint

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
"""Sizes that K-quants have whole blocks of, with heads of the same width."""
MIXED = {"": Kind.Q4_K, "attn_v": Kind.Q6_K, "ffn_down": Kind.Q5_1, "token_embd": Kind.Q8_0}
DENSE = ("llama", "llama_untied", "llama3", "qwen2", "qwen3", "gemma3", "phi3", "phi3_long")
ACTIVATIONS = 0.05
"""What 8-bit activations explain of the logits' relative difference."""


def wide_file(path: Path, name: str = "llama", kind: Any = MIXED, **more: Any) -> Path:
    return tiny_files.write(path, name, kind, model=tiny_files.tiny(name, **WIDE), **more)


def logits(decoder: Any, ids: torch.Tensor) -> torch.Tensor:
    rows, cache = Rows.causal(0, 0, len(ids)), decoder.new_cache(1, len(ids))
    x = decoder.layers(decoder.embed(ids, rows.pos), rows, 0, decoder.info.num_layers, cache)
    found: torch.Tensor = decoder.logits(x)
    return found


@pytest.mark.parametrize("kind", [*BLOCKS, *FLOATS])
def test_blocks_are_the_files_and_numbers_the_packages(kind: str, tmp_path: Path) -> None:
    path = wide_file(tmp_path / "m.gguf", "qwen3", Kind[kind])
    model, _ = load_gguf(path, None)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    found = quantised_weights(model)
    assert len(found) == 2 * 7 + 2
    for name, weight in found.items():
        tensor = stored[weight.name]
        assert np.array_equal(weight.blocks(), tensor.data.view(np.uint8).reshape(len(weight), -1))
        assert weight.nbytes == tensor.n_bytes and weight.format == kind
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(weight.shape)
        whole = weight.dequantise(torch.float32)
        assert np.array_equal(whole.numpy(), numbers), name
        rows = torch.tensor([5, 0, 17, 5])
        assert torch.equal(weight.dequantise(torch.float32, rows), whole[rows])
        assert torch.equal(
            weight[8:24][rows[:3].clamp(max=15)].dequantise(torch.float32),
            whole[8:24][rows[:3].clamp(max=15)],
        )
        assert np.array_equal(weight.blocks(3, 9), weight.blocks()[3:9])
        places = np.array([0, 300, weight.shape[0] * weight.shape[1] - 1])
        assert np.array_equal(weight.values_at(places), whole.flatten().numpy()[places])


@pytest.mark.parametrize("name", tiny_files.NAMES)
def test_expanding_it_gives_the_dequantised_model(name: str, tmp_path: Path) -> None:
    kinds = {"": Kind.Q4_0, "attn": Kind.Q8_0, "ffn_up": Kind.F16}
    path = tiny_files.write(tmp_path / "m.gguf", name, kinds)
    model, _ = load_gguf(path, None)
    whole, _ = load_gguf(path, torch.bfloat16)
    assert fingerprint(model) == fingerprint(whole)
    found, expected = expanded(model).state_dict(), whole.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert quantised_weights(model) and not quantised_weights(expanded(model))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = model.config.tie_word_embeddings
    assert (weight_of(embedding) is weight_of(head)) == (embedding.weight is head.weight) == tied


@pytest.mark.parametrize("name", DENSE)
def test_native_logits_are_the_dequantised_models(name: str, tmp_path: Path) -> None:
    skip_without_kernel()
    path = wide_file(tmp_path / "m.gguf", name)
    model, _ = load_gguf(path, None)
    decoder = load_decoder(model)
    assert isinstance(decoder, NativeDecoder) and quantised_weights(model)
    ids = torch.randint(5, 200, (24,), generator=torch.Generator().manual_seed(1))
    expected = logits(load_decoder(load_gguf(path, torch.bfloat16)[0]), ids)
    assert relative_difference(logits(decoder, ids), expected) < ACTIVATIONS
    rows = decoder.head_rows(ids).float()
    assert torch.equal(rows, expanded(model).get_output_embeddings().weight[ids].float())


@pytest.mark.parametrize("method", ["autoregressive", "sam"])
def test_drafts_do_not_change_its_text(method: str, tmp_path: Path) -> None:
    skip_without_kernel()
    engine = multirate.attach(wide_file(tmp_path / "m.gguf"))
    prompts, stop = [[5, 9, 5, 9, 5, 9, 5], [30, 31, 32]], engine.stopping(12)
    sampled = SamplingSettings(temperature=0.8, seed=3)
    for sampling in (SamplingSettings(), sampled):
        plain = engine.generate(prompts, sampling, stop, speculate="never").sequences
        drafted = engine.generate(prompts, sampling, stop, method, speculate="always").sequences
        assert drafted == plain


def test_custom_generate_runs_it_and_leaves_the_rest_to_an_expanded_copy(tmp_path: Path) -> None:
    skip_without_kernel()
    path = wide_file(tmp_path / "m.gguf")
    engine = multirate.attach(path)
    ids, ours = torch.tensor([[5, 6, 7, 8]]), multirate.custom_generate()
    tokens = engine.generate(ids.tolist(), stop=engine.stopping(8)).sequences[0]
    asked = {"max_new_tokens": 8, "do_sample": False}
    found = engine.model.generate(ids, custom_generate=ours, **asked)
    assert found[0, 4:].tolist() == tokens
    expected = load_gguf(path)[0].generate(ids, num_beams=2, **asked)
    with pytest.warns(UserWarning, match="beam search is left to the model's own generate"):
        found = engine.model.generate(ids, num_beams=2, custom_generate=ours, **asked)
    assert torch.equal(found, expected)


class _Undo:
    """A processor of transformers that does one thing to every tensor."""

    def __init__(self, change: Callable[[np.ndarray], np.ndarray]) -> None:
        self._change = change

    def process(self, weights: np.ndarray, name: str) -> Any:
        return SimpleNamespace(weights=self._change(weights))


def test_only_permutations_of_rows_are_left_in_the_file(tmp_path: Path) -> None:
    model, _ = load_gguf(tiny_files.write(tmp_path / "m.gguf", kind=Kind.Q8_0), None)
    (tensor, *_) = [w for w in quantised_weights(model).values() if "attn_q" in w.name]
    assert tensor.rows is not None and sorted(tensor.rows) == list(range(64))
    order = np.random.default_rng(0).permutation(64)
    found = _row_order(_Undo(lambda w: w[order]), tensor)  # type: ignore[arg-type]
    assert found is not None and np.array_equal(found, order)
    for change in (
        lambda w: w - 1,
        lambda w: w * 2,
        lambda w: -w,
        lambda w: w.T,
        lambda w: w[:32],
        lambda w: w[:, ::-1],
        lambda w: np.concatenate([w[:32], w[:32]]),
    ):
        assert _row_order(_Undo(change), tensor) is None  # type: ignore[arg-type]


def rewritten(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    "change",
    [rewritten, lambda path: os.truncate(path, 30_000), lambda path: path.open("ab").write(b"x")],
)
def test_a_file_that_changes_is_noticed(change: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tiny_files.write(tmp_path / "m.gguf", kind=Kind.Q8_0)
    model, _ = load_gguf(path, None)
    change(path)
    for weight in quantised_weights(model).values():
        with pytest.raises(UserError, match=r"m\.gguf changed while it was read"):
            weight.blocks()
    with pytest.raises(UserError, match=r"m\.gguf changed while it was read"):
        load_decoder(model)


def test_a_file_that_disappears_is_still_read(tmp_path: Path) -> None:
    path = tiny_files.write(tmp_path / "m.gguf", kind=Kind.Q8_0)
    model, _ = load_gguf(path, None)
    expected = load_gguf(path)[0].state_dict()
    path.unlink()
    found = expanded(model).state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_formats_that_the_kernel_lacks_are_refused_by_name(tmp_path: Path) -> None:
    model = tiny_files.tiny("llama")
    model.model.layers[1].mlp.up_proj.weight.data.zero_()
    kinds = {"": Kind.Q8_0, "ffn_up": Kind.F32}
    path = tiny_files.write(tmp_path / "m.gguf", kind=kinds, model=model)
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.1.ffn_up.weight") + len("blk.1.ffn_up.weight") + 4 + 2 * 8
    assert data[at] == Kind.F32
    for kind in (Kind.IQ4_NL, Kind.MXFP4, Kind.I8):
        data[at] = int(kind)
        path.write_bytes(data)
        with pytest.raises(UserError) as caught:
            load_model(str(path))
        words = (str(path), "blk.1.ffn_up.weight", kind.name, "accepted: Q8_0, Q4_0")
        assert all(word in str(caught.value) for word in words), caught.value
        assert ("--weights bf16" in str(caught.value)) == (kind != Kind.I8)
    data[at] = int(Kind.IQ4_NL)
    path.write_bytes(data)
    assert load_model(str(path), weights="bf16").model.dtype == torch.bfloat16


def test_scales_that_are_not_finite_name_the_tensor(tmp_path: Path) -> None:
    skip_without_kernel()
    path = tiny_files.write(tmp_path / "m.gguf", kind=Kind.Q8_0)
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_down.weight")
    for scale in (np.nan, np.inf):
        data = bytearray(path.read_bytes())
        at = tensor.data_offset + 7 * 3 * 34  # a block in the middle
        data[at : at + 2] = np.float16(scale).tobytes()
        path.write_bytes(data)
        model, _ = load_gguf(path, None)
        with pytest.raises(UserError, match=r"m\.gguf: tensor blk\.1\.ffn_down\.weight.*finite"):
            load_decoder(model)


def test_a_model_larger_than_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_files.write(tmp_path / "m.gguf", kind=Kind.Q4_0)
    model, _ = load_gguf(path, None)
    room = weight_bytes(model) + 2000  # less than its numbers take, more than its blocks
    monkeypatch.setattr("multirate.loading.gguf.weights.free_memory", lambda: room)
    load_gguf(path, None)
    with pytest.raises(UserError, match=r"does not fit into memory: .* when expanded"):
        load_gguf(path)
    monkeypatch.setattr("multirate.loading.gguf.weights.free_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"m\.gguf does not fit into memory"):
        load_gguf(path, None)
    monkeypatch.setattr("multirate.runtime.native.supported.free_memory", lambda: 1000)
    skip_without_kernel()
    with pytest.raises(UserError, match="does not fit into memory"):
        load_decoder(model)


def test_what_cannot_run_it_expands_it_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multirate.errors._said", set())
    path = tiny_files.write(tmp_path / "m.gguf", kind=Kind.Q8_0)
    model, _ = load_gguf(path, None)
    with pytest.warns(Notice, match=r"expanding the quantised weights .* backend 'hf'"):
        engine = multirate.attach(model, backend="hf")
    assert engine.weights == "bfloat16" and quantised_weights(model)  # its copy was expanded
    ids = torch.randint(5, 200, (1, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = load_gguf(path)[0](ids).logits[0].float()
    torch.testing.assert_close(logits(engine.decoder, ids[0]), expected, rtol=0.05, atol=0.05)
    with pytest.warns(Notice, match=r"expanding the weights of m\.gguf: .* dtype float32"):
        assert load_model(str(path), "float32").model.dtype == torch.float32
    other, _ = load_gguf(tiny_files.write(tmp_path / "other.gguf", "mixtral", Kind.Q8_0), None)
    with pytest.warns(Notice, match=r"expanding the quantised weights .* not mixtral"):
        assert multirate.attach(other).backend == "hf"


def test_choices_of_weights(tmp_path: Path) -> None:
    path = str(tiny_files.write(tmp_path / "m.gguf", kind=Kind.Q8_0))
    assert set(formats(load_model(path).model)) == {"Q8_0", "F32"}
    assert set(formats(load_model(path, weights="bf16").model)) == {"BF16"}
    assert set(formats(load_model(path, "bfloat16").model)) == {"Q8_0", "F32"}
    for arguments, words in (
        ({"weights": "q4_0"}, "has its own quantisation; accepted for a GGUF file: file"),
        ({"weights": "q2"}, "weights is 'q2'; accepted: file, bf16, q8_0, q4_0, q4_1"),
        ({"weights": "bf16", "dtype": "float32"}, "weights bf16 and dtype float32 contradict"),
    ):
        with pytest.raises(UserError, match=words):
            load_model(path, **arguments)
    with pytest.raises(UserError, match="weights q8_0 and dtype float16 contradict"):
        load_model("tiny", "float16", weights="q8_0")
    with pytest.raises(UserError, match="the model is quantised already"):
        multirate.attach(load_model(path).model, weights="q8_0")
    with pytest.raises(UserError, match="do not work with experts=DIR"):
        multirate.attach(path, experts=tmp_path, weights="bf16")


@pytest.mark.parametrize("weights", ["q8_0", "q4_0", "q4_1"])
def test_a_model_quantised_on_load(weights: str) -> None:
    skip_without_kernel()
    model = load_model("tiny", "bfloat16").model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = multirate.attach(model, weights=weights)
    assert engine.backend == "native" and weights.upper() in engine.weights
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    for name, weight in quantised_weights(engine.model).items():
        ends = ("embed_tokens" in name) or ("lm_head" in name)
        assert weight.format == ("Q8_0" if ends else weights.upper())
        kind = Kind[weight.format]
        original = before[name].float().numpy()
        expected = gguf.dequantize(gguf.quantize(original, kind), kind)
        assert np.array_equal(weight.dequantise(torch.float32).numpy(), expected)
        assert np.array_equal(dequantised(weight.blocks(), kind), expected)
    loaded = load_model("tiny", weights=weights).model
    ids = torch.arange(10, 26)
    assert torch.equal(logits(load_decoder(loaded), ids), logits(engine.decoder, ids))
    twin = expanded(engine.model)
    assert (
        twin.lm_head.weight is twin.model.embed_tokens.weight
        or not model.config.tie_word_embeddings
    )


def test_quantising_what_the_kernel_cannot_run_is_refused() -> None:
    model = tiny_files.tiny("mixtral").bfloat16()
    with pytest.raises(UserError, match="weights q8_0 need the native kernel, which cannot run"):
        multirate.attach(model, weights="q8_0")


def test_experts_are_one_below_another(tmp_path: Path) -> None:
    file = GgufFile(tiny_files.write(tmp_path / "m.gguf", "mixtral", Kind.Q4_1))
    name = "blk.1.ffn_down_exps.weight"
    experts, (count, outputs, _) = weight_in_file(file, name), file.tensors[name].shape
    for expert in range(count):
        one = experts[expert * outputs : (expert + 1) * outputs].dequantise(torch.float32)
        assert np.array_equal(one.numpy(), file.values(name)[expert])


def test_weights_are_read_from_their_file_only_when_needed(tmp_path: Path) -> None:
    path = wide_file(tmp_path / "m.gguf")
    model, _ = load_gguf(path, None)
    for parameter in model.parameters():
        assert parameter.is_meta == (parameter.ndim == 2)
    assert all(isinstance(w, QuantisedWeight) for w in quantised_weights(model).values())
