"""Packing and opening: every family's experts, resumed packing, and refusal of whatever would give
wrong tokens.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import multirate.experts.pack as packing
from multirate.errors import UserError
from multirate.experts.layout import ALIGNMENT
from multirate.experts.model import OffloadedExperts, load_without_experts
from multirate.experts.pack import pack
from multirate.experts.shards import Shards
from multirate.experts.store import DATA, INDEX, VERIFIED, ExpertStore, _digest

from .tiny import EXPERTS, FAMILIES, TOP_K, save


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shard", ["50GB", "20KB"])
def test_records_are_the_models_parameters(family: str, shard: str, tmp_path: Path) -> None:
    model = save(family, tmp_path, torch.bfloat16, shard=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    done = []
    index = pack(tmp_path, tmp_path / "store", on_expert=lambda at, of: done.append((at, of)))
    assert done[-1] == (3 * EXPERTS, 3 * EXPERTS) and len(done) == 3 * EXPERTS
    store = ExpertStore.open(tmp_path / "store")
    assert store.index == index and index.top_k == TOP_K and index.num_experts == EXPERTS
    assert store.path.stat().st_size == index.data_bytes and index.record.bytes % ALIGNMENT == 0
    content = torch.frombuffer(bytearray(store.path.read_bytes()), dtype=torch.uint8)
    for row, layer in enumerate(index.layers):
        module = model.model.layers[layer].mlp.experts
        parameters = dict(module.named_parameters())
        assert {field.name for field in index.record.fields} == parameters.keys()
        for expert in range(EXPERTS):
            at = store.offset(row, expert)
            views = index.record.tensors(row, content[at : at + index.record.bytes])
            for name, value in views.items():
                assert torch.equal(value, parameters[name][expert])


def test_an_interrupted_packing_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("olmoe", tmp_path)
    whole = pack(tmp_path, tmp_path / "whole")
    monkeypatch.setattr(packing, "_CHECKPOINT_BYTES", 1)

    def stop(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path, tmp_path / "store", on_expert=stop)
    assert not (tmp_path / "store" / DATA).exists() and not (tmp_path / "store" / INDEX).exists()
    with pytest.raises(UserError, match="not an expert store"):
        ExpertStore.open(tmp_path / "store")
    seen: list[int] = []
    index = pack(
        tmp_path, tmp_path / "store", name=whole.model, on_expert=lambda at, _: seen.append(at)
    )
    assert seen[0] == 6, "the first five were not packed again"
    assert index == whole
    assert (tmp_path / "store" / DATA).read_bytes() == (tmp_path / "whole" / DATA).read_bytes()
    assert sorted(os.listdir(tmp_path / "store")) == [DATA, INDEX]


def test_packing_again(tmp_path: Path) -> None:
    save("olmoe", tmp_path / "a")
    save("olmoe", tmp_path / "b", seed=1)
    first = pack(tmp_path / "a", tmp_path / "store")
    before = (tmp_path / "store" / DATA).stat().st_mtime_ns
    assert pack(tmp_path / "a", tmp_path / "store") == first
    assert (tmp_path / "store" / DATA).stat().st_mtime_ns == before
    with pytest.raises(UserError, match=r"another revision.*--force"):
        pack(tmp_path / "b", tmp_path / "store")
    assert pack(tmp_path / "b", tmp_path / "store", force=True).revision != first.revision


def test_a_revision_is_noticed(tmp_path: Path) -> None:
    """Same names and shapes, one tensor trained on."""
    save("olmoe", tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    pack(tmp_path / "a", tmp_path / "store")
    with Shards(tmp_path / "a") as a, Shards(tmp_path / "b") as b:
        ExpertStore.open(tmp_path / "store", a.revision())
        with pytest.raises(UserError, match="another revision"):
            ExpertStore.open(tmp_path / "store", b.revision())


def damaged(kind: str, store: Path) -> None:
    data, index = store / DATA, store / INDEX
    if kind == "no data":
        data.unlink()
    elif kind == "truncated":
        with data.open("r+b") as file:
            file.truncate(data.stat().st_size - 1)
    elif kind == "flipped bit":
        with data.open("r+b") as file:
            file.seek(data.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 4]))
    elif kind == "no index":
        index.unlink()
    elif kind == "index is no JSON":
        index.write_text(index.read_text()[:-20])
    elif kind == "edited index":
        content = json.loads(index.read_text())
        content["record_bytes"] *= 2
        index.write_text(json.dumps(content))
    elif kind == "other JSON":
        index.write_text("[1, 2]")
    else:
        assert kind == "other version"
        index.write_text(json.dumps({**json.loads(index.read_text()), "version": 99}))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no data", "has no experts.bin"),
        ("truncated", "bytes, not the"),
        ("flipped bit", "checksum of expert"),
        ("no index", "is not an expert store"),
        ("index is no JSON", "not valid JSON"),
        ("edited index", "damaged"),
        ("other JSON", "not the index"),
        ("other version", "version 99"),
    ],
)
@pytest.mark.parametrize("opened_before", [False, True])
def test_damage_is_refused(kind: str, message: str, opened_before: bool, tmp_path: Path) -> None:
    save("olmoe", tmp_path)
    store = tmp_path / "store"
    pack(tmp_path, store)
    if opened_before:
        ExpertStore.open(store)
        assert (store / VERIFIED).is_file()
    damaged(kind, store)
    with pytest.raises(UserError, match=message) as caught:
        ExpertStore.open(store)
    assert "\n" not in str(caught.value)


def nested(depth: int) -> Any:
    made: Any = 1
    for _ in range(depth):
        made = [made]
    return made


FIELD = {"name": "down_proj", "shape": [32, 16], "offset": 4096}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layout", "weird", r"layout is 'weird'; accepted: module, native"),
        ("layout", "native", r"hidden is None; accepted: 1 to"),
        ("layout", None, r"layout is None"),
        ("dtype", "float64", r"dtype is 'float64'; accepted: bfloat16, float16, float32"),
        ("dtype", "Tensor", r"dtype is 'Tensor'"),
        ("num_experts", 10**18, r"num_experts is 1000000000000000000; accepted: 1 to"),
        ("num_experts", 10**400, r"num_experts is 1000.*\.\.\..*; accepted"),
        ("num_experts", -1, r"num_experts is -1"),
        ("num_experts", 6.0, r"num_experts is 6.0"),
        ("num_experts", True, r"num_experts is True"),
        ("num_experts", 7, r"checksums is .*eight hex digits for each of 21 records"),
        ("top_k", 7, r"top_k is 7; accepted: 1 to 6"),
        ("top_k", float("nan"), r"top_k is nan"),
        ("record_bytes", 10**12, r"bytes, not the 18000"),
        ("record_bytes", 8191, r"record_bytes is 8191; accepted: a multiple of 4096"),
        ("record_bytes", 1 << 60, r"record_bytes is 1152921504606846976"),
        ("layers", [0, 0, 1], r"layers is \[0, 0, 1\]"),
        ("layers", [2, 1, 0], r"layers is \[2, 1, 0\]"),
        ("layers", "012", r"layers is '012'"),
        ("layers", nested(200), r"layers is \[\[\["),
        ("fields", [], r"fields is \[\]"),
        ("fields", [FIELD], r"fields is"),
        ("fields", [FIELD, {**FIELD, "name": "gate_up_proj"}], r"fields is"),
        (
            "fields",
            [{"name": "gate_up_proj", "shape": [10**9, 10**9], "offset": 0}, FIELD],
            r"fields is",
        ),
        ("fields", [7], r"fields is \[7\]"),
        ("checksums", ["zzzzzzzz"] * 18, r"checksums is"),
        ("checksums", [], r"checksums is \[\]"),
        ("model", 7, r"model is 7; accepted: a string"),
        ("version", nested(200), r"has version \[\[\["),
    ],
)
def test_an_index_that_was_made_up_is_refused(
    name: str, value: Any, message: str, tmp_path: Path
) -> None:
    """With a right digest: each value is compared before anything is built from it."""
    save("olmoe", tmp_path)
    pack(tmp_path, tmp_path / "store")
    place = tmp_path / "store" / INDEX
    content = {**json.loads(place.read_text()), name: value}
    del content["digest"]
    place.write_text(json.dumps({**content, "digest": _digest(content)}))
    with pytest.raises(UserError, match=message) as caught:
        ExpertStore.open(tmp_path / "store")
    assert str(place) in str(caught.value) or "experts.bin" in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_an_index_nested_too_deeply(tmp_path: Path) -> None:
    save("olmoe", tmp_path)
    pack(tmp_path, tmp_path / "store")
    place = tmp_path / "store" / INDEX
    place.write_text("[" * 200_000)
    with pytest.raises(UserError, match=f"{place}: not valid JSON .nested too deeply"):
        ExpertStore.open(tmp_path / "store")


def test_experts_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model = save("olmoe", tmp_path)
    model.model.layers[1].mlp.experts.down_proj.data[2, 0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"expert 2 of layer 1: down_proj holds .* not finite"):
        pack(tmp_path, tmp_path / "store")


def test_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    """The index is right in itself, and not the model's."""
    save("olmoe", tmp_path)
    pack(tmp_path, tmp_path / "store")
    place = tmp_path / "store" / INDEX
    for name, value, message in (
        ("top_k", 3, "top_k is 3; layer 0 of the model has 2"),
        ("fields", None, r"gate_up_proj is \(16, 64\); layer 0 of the model has"),
    ):
        whole = place.read_text()
        content = json.loads(whole)
        del content["digest"]
        if value is None:
            value = [
                {**one, "shape": [one["shape"][0] // 2, one["shape"][1] * 2]}
                for one in content["fields"]
            ]
        content[name] = value
        place.write_text(json.dumps({**content, "digest": _digest(content)}))
        store = ExpertStore.open(tmp_path / "store")
        with pytest.raises(UserError, match=message):
            OffloadedExperts(load_without_experts(tmp_path), store)
        place.write_text(whole)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if "expert" not in k}, "has no experts"),
        (
            lambda t: {k: v for k, v in t.items() if ".experts.2.up" not in k},
            "expert 2 of layer 0 has no up",
        ),
        (lambda t: {k: v for k, v in t.items() if "1.mlp.experts.5" not in k}, "different numbers"),
        (
            lambda t: t | {"model.layers.0.mlp.experts.gate_up_proj_blocks": torch.zeros(2)},
            "quantised",
        ),
        (lambda t: {k: v.to(torch.float64) for k, v in t.items()}, "accepted: bfloat16"),
        (
            lambda t: t | {"model.layers.1.mlp.experts.3.up_proj.weight": torch.zeros(17, 32)},
            "expert 3 of layer 1",
        ),
    ],
)
def test_checkpoints_that_cannot_be_packed(spoil: Any, message: str, tmp_path: Path) -> None:
    save("olmoe", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(spoil(load_file(file)), file, {"format": "pt"})
    with pytest.raises(UserError, match=message):
        pack(tmp_path, tmp_path / "store")
    assert not (tmp_path / "store" / DATA).exists()


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only safetensors"):
        pack(tmp_path, tmp_path / "store")
    save("olmoe", tmp_path, shard="20KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(UserError, match=lost.name):
        pack(tmp_path, tmp_path / "store")
    lost.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=f"cannot read .*{lost.name}"):
        pack(tmp_path, tmp_path / "store")
