"""Experts in the formats of GGUF files: packed as the file has them, or made from floats; computed
with where they were read to; and the same text whatever is loaded when.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as tf
from gguf import GGMLQuantizationType as Kind
from lab.bench import tiny_model
from loading.gguf import tiny_files
from native_kernel import skip_without_kernel

import multirate
from multirate.engine import PLAIN
from multirate.errors import UserError
from multirate.experts.load import load_offloaded
from multirate.experts.named_policies import FIXED_POLICIES
from multirate.experts.pack import pack
from multirate.experts.runtime import ExpertSettings
from multirate.experts.store import DATA, INDEX, ExpertStore, _digest
from multirate.loading.gguf.load import load_gguf
from multirate.loading.hub import load_model
from multirate.runtime.quantised import quantised_weights
from multirate.runtime.rows import Rows

IDS = torch.randint(5, 200, (24,), generator=torch.Generator().manual_seed(4))
POLICIES = [name for name in (*FIXED_POLICIES, "aot") if name != "accelerated"]
K_FILE = {
    "": Kind.Q4_K,
    "token_embd": Kind.Q6_K,
    "ffn_down_exps": Kind.Q6_K,
    "blk.1.ffn_gate_exps": Kind.Q5_K,
    "blk.1.ffn_up_exps": Kind.Q8_0,
    "blk.1.ffn_down_exps": Kind.BF16,
}
"""Formats that differ between layers, and in one layer between gate, up and down."""
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
"""Sizes that K-quants have whole blocks of, with heads of the same width as the tiny ones."""
FILES: Mapping[str, Any] = {"Q8_0": Kind.Q8_0, "Q4_0": Kind.Q4_0, "K": K_FILE}
ON_LOAD = ("q8_0", "q4_0", "q4_1", "bf16")


def folder_of_floats(place: Path) -> Path:
    torch.manual_seed(3)
    config = tf.Qwen3MoeConfig(
        vocab_size=261,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        intermediate_size=96,
        moe_intermediate_size=96,
        num_experts=6,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.15,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    tf.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(place)
    tiny_model.tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module", params=[*FILES, "q8_0", "q4_0"])
def packed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, Path]]:
    """A model, a GGUF file or a folder, and its store."""
    skip_without_kernel()
    place, name = tmp_path_factory.mktemp(request.param), request.param
    if name in FILES:
        model = tiny_files.tiny("mixtral", **WIDE)
        for parameter in model.parameters():  # at the tiny ones' size, rounding shows twenty-fold
            parameter.data *= 0.4 if parameter.ndim > 1 else 1.0
        files = tiny_files.write(place / "model.gguf", "mixtral", FILES[name], model=model)
        pack(files, place / "store")
    else:
        files = folder_of_floats(place / "model")
        pack(files, place / "store", weights=name)
    yield name, files, place / "store"


def exact_model(files: Path, store: Path) -> Any:
    """transformers' model in float32, of the numbers that the store's blocks stand for."""
    if files.is_file():
        return load_gguf(files, torch.float32)[0]
    model = load_model(str(files), "float32").model
    opened = ExpertStore.open(store)
    for row, layer in enumerate(opened.index.layers):
        experts = model.model.layers[layer].mlp.experts
        for expert in range(opened.index.num_experts):
            for name, value in opened.index.record.tensors(
                row, record_of(opened, row, expert)
            ).items():
                getattr(experts, name).data[expert] = value.float()
    return model


def record_of(store: ExpertStore, row: int, expert: int) -> torch.Tensor:
    data, at = store.path.read_bytes(), store.offset(row, expert)
    return torch.frombuffer(bytearray(data[at : at + store.index.record.bytes]), dtype=torch.uint8)


def logits(loaded: Any, decoder: Any) -> torch.Tensor:
    cache, found = decoder.new_cache(1, 32), []
    for begin, end in ((0, 16), (16, 17), (17, 18), (18, 24)):
        rows = Rows.causal(0, begin, end - begin)
        x = decoder.embed(IDS[begin:end], rows.pos)
        found.append(decoder.logits(decoder.layers(x, rows, 0, decoder.info.num_layers, cache)))
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K"])
def test_records_hold_the_files_numbers(kind: str, tmp_path: Path) -> None:
    skip_without_kernel()
    model = tiny_files.tiny("mixtral", **WIDE)
    path = tiny_files.write(tmp_path / "a.gguf", "mixtral", Kind[kind], model=model)
    index = pack(path, tmp_path / "store")
    assert index.record.weights == kind and index.layout == "native"
    store, reader = ExpertStore.open(tmp_path / "store"), gguf.GGUFReader(path)
    tensors = {one.name: one for one in reader.tensors}
    for row, expert in ((0, 0), (1, 3)):
        gate, up, down = (
            torch.from_numpy(gguf.dequantize(np.asarray(found.data[expert]), found.tensor_type))
            for part in ("gate", "up", "down")
            for found in [tensors[f"blk.{row}.ffn_{part}_exps.weight"]]
        )
        held = index.record.tensors(row, record_of(store, row, expert))
        assert torch.equal(held["gate_up_proj"], torch.cat([gate, up]).bfloat16())
        assert torch.equal(held["down_proj"], down.bfloat16())


def test_floats_become_the_blocks_that_gguf_makes(tmp_path: Path) -> None:
    skip_without_kernel()
    files = folder_of_floats(tmp_path / "model")
    experts = load_model(str(files)).model.model.layers[1].mlp.experts
    for name in ON_LOAD:
        index = pack(files, tmp_path / name, weights=name)
        assert index.record.weights == name.upper()
        held = index.record.tensors(1, record_of(ExpertStore.open(tmp_path / name), 1, 4))
        for field, value in held.items():
            wanted = getattr(experts, field)[4].detach()
            if name != "bf16":
                blocks = gguf.quantize(wanted.float().numpy(), Kind[name.upper()])
                wanted = torch.from_numpy(gguf.dequantize(blocks, Kind[name.upper()])).bfloat16()
            assert torch.equal(value, wanted), (name, field)


def test_logits_are_those_of_the_numbers(packed: Any) -> None:
    """Against fp32 of the same numbers: what is left is the rounding of rows to 8 bits, and of
    residuals; a token whose router is near a tie may differ more.
    """
    name, files, store = packed
    loaded = load_offloaded(str(files), store)
    assert loaded.experts is not None
    assert files.is_dir() or len(quantised_weights(loaded.model)) > 4
    decoder = loaded.experts.start("native", "lru")
    with torch.no_grad():
        exact = exact_model(files, store)(IDS[None]).logits[0]
    for backend in ("native", "hf"):
        decoder = loaded.experts.start(backend, "lru")
        found = logits(loaded, decoder)
        errors = (found - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert errors.median() < 0.04, (name, backend, errors)
    loaded.experts.remove()


@pytest.mark.parametrize("policy", POLICIES)
def test_texts_are_the_same_for_every_policy_and_budget(packed: Any, policy: str) -> None:
    _, files, store = packed
    record = ExpertStore.open(store).index.record.bytes
    prompts = [[9, 30, 41, 77, 12], [33, 8]]
    texts = []
    for slots, chosen in ((None, "lru"), (3, policy), (7, policy)):
        memory = None if slots is None else slots * record
        engine = multirate.attach(
            str(files), experts=store, expert_memory=memory, expert_policy=chosen, backend="native"
        )
        assert engine.experts is not None and engine.experts.runtime is not None
        assert files.is_dir() or "BF16" not in engine.weights, "experts are not counted"
        texts.append(engine.generate(prompts, stop=engine.stopping(16), method=PLAIN).sequences)
        stats = engine.experts.runtime.stats
        assert engine.experts.runtime.in_kernel and not stats.errors
        assert (
            stats.bytes == stats.demand_bytes + stats.speculative_bytes and not stats.bytes % record
        )
        assert stats.bytes >= record * (stats.uses - stats.hits - stats.timely - stats.late)
        engine.experts.remove()
    assert texts[0] == texts[1] == texts[2]


def test_bits_are_the_same_in_python_and_in_the_kernel(packed: Any) -> None:
    _, files, store = packed
    loaded = load_offloaded(str(files), store)
    assert loaded.experts is not None
    decoder = loaded.experts.start("native")
    found = []
    for slots, kernel in ((None, True), (None, False), (3, True), (3, False)):
        size = loaded.experts.store.index.record.bytes
        memory = None if slots is None else slots * size
        runtime = loaded.experts.use(ExpertSettings(memory, kernel=kernel), "next_layer_gate")
        for slot in runtime.memory.slots:
            slot.fill_(0xFF)
        found.append(logits(loaded, decoder))
        assert runtime.in_kernel == kernel
    assert all(torch.equal(one, found[0]) for one in found)
    loaded.experts.remove()


def test_transformers_own_loop_reads_the_same_store(packed: Any) -> None:
    _, files, store = packed
    model = multirate.offload(files, store, memory=10 * ExpertStore.open(store).index.record.bytes)
    with torch.no_grad():
        found, exact = model(IDS[None]).logits[0], exact_model(files, store)(IDS[None]).logits[0]
    errors = (found.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert errors.median() < 0.03, errors


def test_weights_that_contradict_the_model_or_the_store(packed: Any, tmp_path: Path) -> None:
    name, files, store = packed
    if files.is_dir():
        with pytest.raises(UserError, match=f"in the layout native, in {name.upper()}; name"):
            pack(files, store, weights="q4_1")
        with pytest.raises(UserError, match=f"in the layout native, in {name.upper()}; name"):
            pack(files, store)
        assert pack(files, store, weights=name) == ExpertStore.open(store).index
        with pytest.raises(UserError, match="layout module keeps the weights as they are"):
            pack(files, tmp_path / "s", layout="module", weights="q8_0")
    else:
        with pytest.raises(UserError, match="has its own quantisation; accepted for a GGUF file"):
            pack(files, tmp_path / "s", weights="q8_0")
        with pytest.raises(UserError, match="packed for the kernel"):
            pack(files, tmp_path / "s", layout="module")
        assert pack(files, tmp_path / "s", weights="bf16").record.weights == "BF16"
    with pytest.raises(UserError, match=r"weights is 'q3'; accepted: file, bf16"):
        pack(files, tmp_path / "t", weights="q3")


def changed(store: Path, **values: Any) -> None:
    content = {**json.loads((store / INDEX).read_text()), **values}
    del content["digest"]
    (store / INDEX).write_text(json.dumps({**content, "digest": _digest(content)}))


def test_stores_that_are_damaged_or_made_up(tmp_path: Path) -> None:
    skip_without_kernel()
    files, store = folder_of_floats(tmp_path / "model"), tmp_path / "store"
    index = pack(files, store, weights="q4_0")
    whole, data = (store / INDEX).read_text(), (store / DATA).read_bytes()
    same = [["Q4_0"] * 3] * 3
    for values, message in (
        ({"formats": [["Q3_K"] * 3, *same[1:]]}, r"formats is \[\['Q3_K', .*accepted: .*Q8_0"),
        ({"formats": same[1:]}, r"formats is .*accepted: for each of 3 layers"),
        ({"formats": [["Q4_0"] * 2] * 3}, r"formats is"),
        ({"formats": [[["Q4_0"]] * 3] * 3}, r"formats is"),
        ({"formats": "Q4_0"}, r"formats is 'Q4_0'"),
        ({"formats": [["Q8_0"] * 3] * 3}, r"record_bytes is \d+; accepted: \d+ in these formats"),
        ({"formats": [["Q4_K"] * 3] * 3}, r"intermediate is 96; accepted: a width"),
        ({"hidden": 100}, r"intermediate is 96"),
        ({"hidden": -64}, r"hidden is -64; accepted: 1 to"),
        ({"hidden": 1 << 24, "intermediate": 1 << 24}, r"record_bytes is"),
        ({"intermediate": None}, r"intermediate is None"),
        ({"version": 1}, r"has version 1; accepted: 2; pack it again"),
    ):
        changed(store, **values)
        with pytest.raises(UserError, match=message) as caught:
            ExpertStore.open(store)
        assert "\n" not in str(caught.value)
        (store / INDEX).write_text(whole)
    (store / DATA).write_bytes(data[:-4096])
    with pytest.raises(UserError, match=r"bytes, not the \d+ that"):
        load_offloaded(str(files), store)
    (store / DATA).write_bytes(data[:5000] + b"??" + data[5002:])
    with pytest.raises(UserError, match=r"checksum of expert \d+ in layer \d"):
        load_offloaded(str(files), store)
    assert index.data_bytes == len(data)


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    skip_without_kernel()
    path = tiny_files.write(tmp_path / "a.gguf", "qwen3moe", Kind.Q8_0)
    data = bytearray(path.read_bytes())
    tensor = next(
        one for one in gguf.GGUFReader(path).tensors if one.name == "blk.1.ffn_up_exps.weight"
    )
    data[tensor.data_offset : tensor.data_offset + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"tensor blk.1.ffn_up_exps.weight is damaged: a scale"):
        pack(path, tmp_path / "store")
    assert not (tmp_path / "store" / DATA).exists()


def test_files_that_cannot_be_packed(tmp_path: Path) -> None:
    skip_without_kernel()
    dense = tiny_files.write(tmp_path / "dense.gguf", "llama", Kind.Q8_0)
    with pytest.raises(UserError, match="has no experts to pack"):
        pack(dense, tmp_path / "store")
    other = tiny_files.write(tmp_path / "a.gguf", "mixtral", Kind.Q8_0)
    pack(other, tmp_path / "store")
    third = tiny_files.write(tmp_path / "b.gguf", "mixtral", Kind.Q4_0)
    with pytest.raises(UserError, match="another one or has another revision"):
        load_offloaded(str(third), tmp_path / "store")
