"""SkipDecode's schedule: the position alone decides, for the whole batch, and depth never rises."""

from __future__ import annotations

from typing import Any

import pytest

from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.decoding.loop import generate
from multirate.decoding.session import Session
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.lab.depth_baselines.skipdecode.spec import PositionSchedule, SkipDecodeConfig
from multirate.runtime.hf.decoder import HFDecoder

from .m2r2_models import LLAMA, PROMPTS, model_of

LAYERS = LLAMA.num_hidden_layers


@pytest.mark.parametrize(
    ("depth", "ranges"),
    [
        (30, [(0, 30)]),
        (29, [(0, 8), (9, 30)]),
        (20, [(0, 8), (18, 30)]),
        (9, [(0, 8), (29, 30)]),
    ],
)
def test_what_is_skipped_lies_above_the_warm_up(depth: int, ranges: list[tuple[int, int]]) -> None:
    assert SkipDecodeConfig(warmup_layers=8).layers(30, depth) == ranges
    assert sum(stop - start for start, stop in ranges) == depth


def test_depth_falls_linearly_between_the_shares_and_never_below_the_warm_up() -> None:
    config = SkipDecodeConfig(max_share=0.9, min_share=0.5, warmup_layers=8)
    depths = [config.depth(30, t / 10) for t in range(12)]
    assert depths[0] == 27 and depths[5] == 21 and depths[10] == depths[11] == 15
    assert depths == sorted(depths, reverse=True)
    assert SkipDecodeConfig(min_share=0.01, warmup_layers=8).depth(30, 1.0) == 9
    assert SkipDecodeConfig().warmup_of(30) == 12
    for layers in (1, 2, 3):  # a shallow model keeps at least its last layer
        config = SkipDecodeConfig(min_share=0.01)
        assert config.layers(layers, config.depth(layers, 1.0))[-1][1] == layers


def test_the_depth_of_a_batch_never_rises() -> None:
    """Not even when the sequence that was furthest ends before the others."""
    policy = PositionSchedule(LAYERS, SkipDecodeConfig(min_share=0.25))
    depths: list[int] = []
    told = policy.schedule

    def schedule(session: Session, seqs: Any) -> Any:
        ranges = told(session, seqs)
        depths.append(sum(stop - start for start, stop in ranges))
        return ranges

    policy.schedule = schedule  # type: ignore[method-assign]
    skipped: list[int] = []

    def check(session: Session, step: Step) -> None:
        skipped.append(sum(hole.stop - hole.start for hole in step.holes(0)))

    def ends(b: int, tokens: list[int]) -> bool:
        return b == 0 and len(tokens) == 9

    stop = StopSettings(max_new_tokens=13, ends=ends)
    decoder = HFDecoder(model_of(LLAMA))
    step = DynamicDepthStep(policy, "none")
    for _ in range(2):  # a generation begins at the top again
        depths.clear()
        out = generate(decoder, step, PROMPTS, stop=stop, after_step=check)
        assert depths == sorted(depths, reverse=True) and depths[0] == LAYERS
        reached = depths[-1]
        assert reached == SkipDecodeConfig().warmup_of(LAYERS) + 1
        assert sum(out.stats.exits.values()) == out.stats.tokens - len(PROMPTS)
        assert set(out.stats.exits) == set(depths)


@pytest.mark.parametrize(
    "wrong",
    [{"max_share": 0.0}, {"min_share": 1.1}, {"max_share": 0.5, "min_share": 0.6}],
)
def test_settings_that_cannot_be_used_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="_share"):
        SkipDecodeConfig(**wrong)
    with pytest.raises(UserError, match=f"below the model's {LAYERS} layers"):
        PositionSchedule(LAYERS, SkipDecodeConfig(warmup_layers=LAYERS))
