"""Configs survive JSON and refuse what they cannot use, naming field, value and what is
accepted.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from multirate.errors import UserError
from multirate.methods._shared.shape import BaseShape
from multirate.methods.kangaroo.config import KangarooConfig
from multirate.methods.m2r2.config import M2R2Config, default_paper_gates
from multirate.methods.spec import find_training
from multirate.training.settings import TrainSettings

from .tiny import base

SHAPE = BaseShape.of(base().config)


@pytest.mark.parametrize(
    "config",
    [
        M2R2Config.for_base(SHAPE, "m2r2"),
        M2R2Config.for_base(SHAPE, "m2r2-carry"),
        KangarooConfig.for_base(SHAPE),
        TrainSettings(heldout_files=("a.jsonl",)),
    ],
)
def test_json_round_trip(config: Any) -> None:
    assert type(config).from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    "change,words",
    [
        ({"gates": [2, 1]}, ["gates", "(2, 1)", "increasing"]),
        ({"gates": []}, ["gates"]),
        ({"gates": [4]}, ["gates", "(4,)", "4 layers"]),
        ({"gates": "1"}, ["gates", "'1'", "list"]),
        ({"rank": 0}, ["rank", "0", "at least 1"]),
        ({"rank": True}, ["rank", "True", "whole number"]),
        ({"mlp_adapter": "big"}, ["mlp_adapter", "'big'", "'parallel'"]),
        ({"carry": False}, ["unroll_steps", "3"]),
        ({"draft_vocab": 10**6}, ["draft_vocab", "61"]),
        ({"gate": [1]}, ["'gate'", "accepted fields", "gates"]),
    ],
)
def test_invalid_fields_are_named(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        M2R2Config.for_base(SHAPE, "m2r2-carry", **change)
    assert all(word in str(caught.value) for word in words), caught.value


def test_incomplete_and_unknown() -> None:
    with pytest.raises(UserError, match="gates"):
        M2R2Config.from_json({})
    with pytest.raises(UserError, match="m2r2-carry"):
        find_training("no_such_method")
    with pytest.raises(
        UserError, match=r"tokens_per_batch.*at least max_length \(200, which --max-length sets\)"
    ):
        TrainSettings(tokens_per_batch=100, max_length=200)


def test_presets_and_gates() -> None:
    assert default_paper_gates(20) == (5, 10, 15)
    assert default_paper_gates(2) == (1,)
    paper, ours = M2R2Config.for_base(SHAPE, "m2r2"), M2R2Config.for_base(SHAPE, "m2r2-carry")
    assert (
        not (paper.carry or paper.block) and paper.mlp_adapter == "parallel" and paper.reinitialise
    )
    assert ours.carry and ours.block and ours.gates == (1,) and ours.mlp_adapter == "lora"


def test_experts_cannot_be_adapted_inside() -> None:
    moe = BaseShape.of(base("mixtral").config)
    assert M2R2Config.for_base(moe, "m2r2-carry").mlp_adapter == "parallel"
    with pytest.raises(UserError, match="mixture of experts"):
        M2R2Config.for_base(moe, "m2r2-carry", mlp_adapter="lora")
