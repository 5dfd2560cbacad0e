"""An accelerator on disk: what is saved comes back; whatever does not fit is refused in words."""

from __future__ import annotations

import hashlib
import json
import random
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from lab_files import LAB
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import multirate
from multirate.engine import attach
from multirate.errors import UserError
from multirate.methods._shared.shape import BaseShape
from multirate.methods.spec import find_training
from multirate.training.checkpoint import Accelerator, describe_base
from multirate.training.description import read_description
from multirate.training.fingerprint import fingerprint
from multirate.training.model_card import model_card


def small(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes}))


def accelerator(model: Any, method: str = "m2r2-carry", **options: Any) -> Accelerator:
    made = find_training(method)
    shape = BaseShape.of(model.config)
    config = made.config_for(shape, **options)
    module = made.build(config, shape)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_()
    return Accelerator(method, config, module, describe_base(model, "tiny"), {"steps": 3}, {})


@pytest.mark.parametrize(
    "method,options", [("m2r2", {}), ("m2r2-carry", {"draft_vocab": 20}), ("kangaroo", {})]
)
def test_round_trip(tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    model = small()
    made = accelerator(model, method, **options)
    made.save_pretrained(tmp_path / "a" / "b")
    loaded = Accelerator.from_pretrained(tmp_path / "a" / "b", model)
    assert (
        loaded.config == made.config and loaded.method == method and loaded.training == {"steps": 3}
    )
    for name, tensor in made.module.state_dict().items():
        got = loaded.module.state_dict()[name]
        expected = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        assert torch.equal(got, expected), name
    assert not any(p.requires_grad for p in loaded.module.parameters())
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == [
        "README.md",
        "accelerator.json",
        "accelerator.safetensors",
        "custom_generate",
    ]
    card = (tmp_path / "a" / "b" / "README.md").read_text()
    assert method in card and made.base["fingerprint"] in card
    half = Accelerator.from_pretrained(tmp_path / "a" / "b", small().bfloat16())
    assert next(half.module.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"num_hidden_layers": 4}, ["num_layers 4 instead of 3"]),
        (
            {"hidden_size": 32, "vocab_size": 51},
            ["hidden_size 32 instead of 16", "vocab_size 51 instead of 50"],
        ),
    ],
)
def test_a_base_of_another_shape_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    accelerator(small()).save_pretrained(tmp_path)
    with pytest.raises(UserError) as caught:
        Accelerator.from_pretrained(tmp_path, small(**changes))
    assert "tiny" in str(caught.value) and all(w in str(caught.value) for w in words), caught.value


def test_other_weights_of_the_same_shape_are_accepted_and_said(tmp_path: Path) -> None:
    accelerator(small()).save_pretrained(tmp_path)
    assert Accelerator.from_pretrained(tmp_path, small()).other_weights is None
    relative = Accelerator.from_pretrained(tmp_path, small(initializer_range=0.05))
    fact = relative.other_weights or ""
    for words in (str(tmp_path), "trained for tiny", "other weights", "fingerprint"):
        assert words in fact


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    model = small()
    accelerator(model).save_pretrained(tmp_path)
    weights, description = tmp_path / "accelerator.safetensors", tmp_path / "accelerator.json"
    good_weights, good = weights.read_bytes(), json.loads(description.read_text())

    def refused(match: str) -> None:
        with pytest.raises(UserError, match=match):
            Accelerator.from_pretrained(tmp_path, model)

    weights.write_bytes(good_weights[:-10])
    refused("accelerator.safetensors.*checksum")
    weights.unlink()
    refused("cannot read .*accelerator.safetensors")
    weights.symlink_to("/dev/zero")
    refused("cannot read .*accelerator.safetensors: not a regular file")
    weights.unlink()
    weights.write_bytes(good_weights)
    description.write_text(json.dumps(good)[:-20])
    refused("accelerator.json: not valid JSON")
    description.write_text(json.dumps({**good, "method": "no_such_method"}))
    refused("no_such_method")
    description.write_text(json.dumps({**good, "format": 9}))
    refused("format.*9")
    description.write_text(json.dumps({**good, "config": {**good["config"], "rank": -1}}))
    refused("rank.*-1")
    description.write_text(json.dumps({**good, "config": {**good["config"], "rank": 8}}))
    refused("tensor 'adapters.0.*shape")
    description.write_text("[]")
    refused("no valid field 'format'")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(
        UserError, match=r"other.safetensors is a file; an accelerator is a local folder"
    ):
        Accelerator.from_pretrained(tmp_path / "other.safetensors", model)


@pytest.mark.parametrize(
    "method,field,value",
    [
        ("m2r2-carry", "rank", 100_000_000),
        ("m2r2-carry", "rank", 10**30),
        ("m2r2-carry", "rank", 1 << 20),
        ("m2r2-carry", "arla_dim", 1 << 19),
        ("m2r2-carry", "noise", 10**400),
        ("m2r2-carry", "noise", float("nan")),
        ("m2r2-carry", "gates", [1, 1 << 40]),
        ("m2r2-carry", "gates", [[[[1]]]]),
        ("eagle3", "heads", 1 << 20),
        ("eagle3", "head_dim", 1 << 20),
        ("eagle3", "intermediate", 1 << 20),
        ("eagle3", "norm_eps", 10**400),
        ("eagle3", "rope_theta", float("inf")),
        ("eagle3", "rope_theta", 0),
    ],
)
def test_a_config_is_compared_before_anything_is_built(
    tmp_path: Path, method: str, field: str, value: Any
) -> None:
    model = small()
    accelerator(model, method).save_pretrained(tmp_path)
    description = tmp_path / "accelerator.json"
    good = json.loads(description.read_text())
    description.write_text(json.dumps({**good, "config": {**good["config"], field: value}}))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"accelerator\.(json|safetensors)") as caught:
        Accelerator.from_pretrained(tmp_path, model)
    assert field in str(caught.value) or "tensor '" in str(caught.value)
    assert len(str(caught.value)) < 700
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100_000  # KiB


@pytest.mark.parametrize(
    "results,words",
    [
        ([], "'results'"),
        ({"terms": 3}, "results.terms"),
        ({"terms": [3]}, r"results.terms\[0\]"),
        ({"terms": [{"gate": "x", "draft_step": 1, "agreement": 0.5}]}, "gate' is 'x'"),
        ({"terms": [{"gate": 1, "draft_step": 10**30, "agreement": 0.5}]}, "draft_step' is 1000"),
        (
            {"terms": [{"gate": 1, "draft_step": 1, "agreement": "high"}]},
            "agreement' is 'high'; accepted: a number",
        ),
        ({"terms": [{"gate": 1, "draft_step": 1, "agreement": 1e308}]}, "agreement"),
        ({"terms": [{"gate": 1, "draft_step": 1, "agreement": float("nan")}]}, "agreement' is nan"),
        ({"terms": [{"gate": 1, "draft_step": 1}]}, "agreement' is None"),
        ({"terms": [{"gate": 1, "draft_step": 1, "agreement": 10**400}]}, "agreement' is 1000"),
    ],
)
def test_malformed_results_are_refused(tmp_path: Path, results: Any, words: str) -> None:
    model = small()
    accelerator(model).save_pretrained(tmp_path)
    description = tmp_path / "accelerator.json"
    description.write_text(json.dumps({**json.loads(description.read_text()), "results": results}))
    with pytest.raises(UserError, match=rf"accelerator\.json.*{words}"):
        Accelerator.from_pretrained(tmp_path, model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, value: float) -> None:
    model = small()
    accelerator(model).save_pretrained(tmp_path)
    description, weights = tmp_path / "accelerator.json", tmp_path / "accelerator.safetensors"
    tensors = load_file(weights)
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name].view(-1)[-1] = value
    save_file(tensors, weights)
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    known = json.loads(description.read_text())
    description.write_text(json.dumps(known | {"weights_sha256": digest}))
    with pytest.raises(UserError, match=rf"tensor '{name}' holds values that are not finite"):
        Accelerator.from_pretrained(tmp_path, model)


def test_deep_nesting_and_ids_that_are_none_are_refused(tmp_path: Path) -> None:
    model = small()
    accelerator(model, draft_vocab=20).save_pretrained(tmp_path)
    description, weights = tmp_path / "accelerator.json", tmp_path / "accelerator.safetensors"
    good = description.read_text()
    description.write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"accelerator\.json: not valid JSON \(nested too deeply\)"):
        Accelerator.from_pretrained(tmp_path, model)
    tensors = load_file(weights)
    for ids in (torch.arange(31, 51), torch.arange(-1, 19), torch.zeros(20, dtype=torch.int64)):
        save_file({**tensors, "draft_tokens": ids}, weights)
        changed = {
            **json.loads(good),
            "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        }
        description.write_text(json.dumps(changed))
        with pytest.raises(
            UserError, match="'draft_tokens' must hold increasing token ids below 50"
        ):
            Accelerator.from_pretrained(tmp_path, model)
    save_file({**tensors, "draft_tokens": torch.arange(20.0)}, weights)
    changed = {
        **json.loads(good),
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }
    description.write_text(json.dumps(changed))
    with pytest.raises(UserError, match=r"'draft_tokens' is torch\.float32"):
        Accelerator.from_pretrained(tmp_path, model)


ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    10**9,
    10**30,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 5000,
    "é\x00",
    [],
    [1],
    [[[[]]]],
    {},
    {"a": {"b": []}},
    [0] * 1000,
]


def corrupted(good: dict[str, Any], weights: bytes, draw: random.Random) -> tuple[bytes, bytes]:
    """accelerator.json and the weights after one random damage; checksums match where the weights
    were changed.
    """
    kind = draw.randrange(6)
    text = json.dumps(good).encode()
    if kind == 0:  # bytes of the description
        changed = bytearray(text)
        for _ in range(draw.randint(1, 8)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        return bytes(changed), weights
    if kind == 1:
        return text[: draw.randrange(len(text))], weights
    if kind == 2:  # bytes of the weights' header or body, with the checksum of the damaged file
        damaged = bytearray(weights)
        for _ in range(draw.randint(1, 8)):
            damaged[draw.randrange(min(len(damaged), draw.choice((8, 400, 10**9))))] = (
                draw.randrange(256)
            )
        damaged = damaged[: draw.choice((len(damaged), draw.randrange(len(damaged))))]
        return json.dumps(
            {**good, "weights_sha256": hashlib.sha256(damaged).hexdigest()}
        ).encode(), bytes(damaged)
    changed_json: dict[str, Any] = json.loads(text)
    place: Any = changed_json
    while True:  # any field, however deep
        key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if isinstance(place[key], (dict, list)) and place[key] and draw.random() < 0.8:
            place = place[key]
            continue
        break
    if draw.random() < 0.2 and isinstance(place, dict):
        del place[key]
    else:
        place[key] = draw.choice(ODD)
    return json.dumps(changed_json).encode(), weights


@pytest.mark.parametrize("method", ["m2r2-carry", "kangaroo"])
def test_250_corrupted_accelerators_load_or_are_refused_in_a_sentence(
    tmp_path: Path, method: str
) -> None:
    model = small()
    made = accelerator(model, method)
    term = {"gate": 1, "draft_step": 1, "agreement": 0.5, "overlap": 0.5, "kl": 1.0}
    made.results = {
        "rows": 9,
        "terms": [term],
        "early_exit": {"terms": [term]},
        "simulated_tokens_per_step": 2.0,
    }
    made.save_pretrained(tmp_path)
    description, weights = tmp_path / "accelerator.json", tmp_path / "accelerator.safetensors"
    good, good_weights = json.loads(description.read_text()), weights.read_bytes()
    draw, refused = random.Random(5), 0
    engine, prompt = attach(model), [[1, 2, 3, 2, 3]]
    stop = engine.stopping(6)
    expected = engine.generate(prompt, stop=stop, speculate="never").sequences
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(125):  # of each of two methods
        text, tensors = corrupted(good, good_weights, draw)
        description.write_bytes(text)
        weights.write_bytes(tensors)
        try:
            engine.add(tmp_path, f"damaged{number}")
        except UserError as error:
            refused += 1
            assert len(str(error)) < 900, error
            continue
        if number % 25 == 0:  # whatever its weights are now: drafts never change the text
            found = engine.generate(
                prompt, stop=stop, method=f"damaged{number}", speculate="always"
            ).sequences
            assert found == expected
    assert refused > 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200_000  # KiB


def test_fingerprint_survives_a_cast_and_sees_every_tensor() -> None:
    model = small()
    first = fingerprint(model)
    assert fingerprint(small()) == first
    assert fingerprint(small().bfloat16()) == first
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.mul_(1.5).add_(0.1)  # a training step moves a whole tensor
        assert fingerprint(model) != first, name
        with torch.no_grad():
            parameter.copy_(dict(small().named_parameters())[name])
    assert fingerprint(model) == first


def test_fingerprint_of_a_saved_model(tmp_path: Path) -> None:
    model = small(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path)) == fingerprint(model)


SHIPPED = [
    *Path(multirate.__file__).parent.glob("reference/*/*/accelerator.json"),
    *Path(multirate.__file__).parent.glob("reference/*/accelerators/*/accelerator.json"),
    *LAB.glob("accelerators/*/accelerator.json"),
    *LAB.glob("models/*/predictor/accelerator.json"),
]


@pytest.mark.parametrize("file", SHIPPED, ids=[f"{f.parts[-3]}-{f.parts[-2]}" for f in SHIPPED])
def test_a_shipped_card_is_what_its_description_gives(file: Path) -> None:
    """And it names data, licence and recipe, which are kept when an accelerator is saved again."""
    description = read_description(file, file.read_bytes())
    card = (file.parent / "README.md").read_text()
    assert card == model_card(description), "run python lab/recipes/write_cards.py"
    assert all(f"\n- {word}" in card for word in ("licence: ", "data", "recipe: ", "limits: "))
    assert len(SHIPPED) == 9
