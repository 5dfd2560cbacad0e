"""Mixture-of-Depths: what routers are taught, and that a passed block leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from native_kernel import skip_without_kernel
from torch import Tensor
from transformers import MistralConfig

from multirate.decoding.loop import generate
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.lab.depth_baselines.mixture_of_depths.config import (
    MixtureOfDepthsConfig,
    MixtureOfDepthsDecodeConfig,
)
from multirate.lab.depth_baselines.mixture_of_depths.decode import MixtureOfDepthsStep
from multirate.lab.depth_baselines.mixture_of_depths.modules import Routers
from multirate.lab.depth_baselines.mixture_of_depths.train import (
    RouterObjective,
    chosen,
    start_from_updates,
)
from multirate.methods._shared.shape import BaseShape
from multirate.methods._shared.teacher import Teacher
from multirate.methods.spec import find
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.hf.parts import additive
from multirate.runtime.native import NativeDecoder

from .m2r2_models import LLAMA, PROMPTS, model_of
from .tiny import base, disturb, ids

BLOCKS = (1, 3)


def routers_of(shape: BaseShape, **options: Any) -> Routers:
    config = MixtureOfDepthsConfig.for_base(shape, **{"blocks": list(BLOCKS), **options})
    routers = Routers(config, shape)
    disturb(routers, 0.1)
    return routers


@torch.no_grad()
def without_passed_blocks(
    teacher: Teacher, routers: Routers, text: Sequence[int], prompt: int
) -> tuple[Tensor, Tensor]:
    """The logits [T, V] of a whole text whose tokens after the prompt pass a block by where the
    predictor says so, unseen there by later ones; and how many blocks each ran [T].
    """
    parts = teacher.parts
    tokens = torch.tensor([list(text)])
    slow = teacher.slow(tokens, shared=0)
    x, ran = slow.residual[0], torch.zeros(len(text), dtype=torch.int64)
    own = torch.eye(len(text), dtype=torch.bool)
    for i in range(teacher.shape.num_layers):
        runs = torch.ones(len(text), dtype=torch.bool)
        if i in BLOCKS:
            runs = routers.left_out(BLOCKS.index(i), x[0]) < 0
            runs[:prompt] = True
        ran += runs
        mask = additive((runs[None, :] | own).tril()[None, None], x.dtype)
        with parts.attention():
            after = parts.run_layer(i, x, mask, slow.position_ids, slow.rotary)
        x = torch.where(runs[None, :, None], after, x)
    return teacher.head.logits(teacher.norm(x[0])), ran


def test_a_passed_block_leaves_nothing_that_later_tokens_read() -> None:
    """Decoding with a cache says what a pass over the whole text says, token by token."""
    model = model_of(LLAMA)
    decoder, teacher = HFDecoder(model), Teacher(model)
    routers = routers_of(teacher.shape)
    step = find("mixture_of_depths").make_step(decoder, routers, {"threshold": 0.5})
    out = generate(decoder, step, PROMPTS, stop=StopSettings(max_new_tokens=40))  # type: ignore[arg-type]
    passes: dict[int, int] = {}
    for prompt, answer in zip(PROMPTS, out.sequences, strict=True):
        logits, ran = without_passed_blocks(teacher, routers, [*prompt, *answer[:-1]], len(prompt))
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == answer
        for count in ran[len(prompt) :].tolist():
            passes[count] = passes.get(count, 0) + 1
    assert out.stats.exits == passes and len(passes) > 1


def test_one_kernel_call_says_what_calls_for_each_block_say() -> None:
    low = model_of(LLAMA, torch.bfloat16)
    skip_without_kernel()
    decoder, routers = NativeDecoder(low), routers_of(BaseShape.of(LLAMA))
    settings, stop = MixtureOfDepthsDecodeConfig(), StopSettings(max_new_tokens=40)
    found = [
        generate(
            decoder, MixtureOfDepthsStep(decoder, routers, settings, fused), PROMPTS, stop=stop
        )
        for fused in (True, False)
    ]
    assert found[0].sequences == found[1].sequences
    assert found[0].stats.exits == found[1].stats.exits and len(found[0].stats.exits) > 1


def test_the_share_of_the_response_with_the_highest_weights_runs() -> None:
    weight = torch.tensor([[9.0, 1, 4, 2, 3, 8], [0, 5, 6, 9, 9, 9]])
    mask = torch.tensor([[False, True, True, True, True, False], [False, True, True] + [False] * 3])
    assert chosen(weight, mask, 0.5).int().tolist() == [[1, 0, 1, 0, 1, 1], [1, 0, 1, 1, 1, 1]]
    assert chosen(weight, mask, 0.6).sum() == 5 + 6, "rounded up"


def test_the_loss_reaches_routers_through_their_blocks_and_predictors_learn_the_choice() -> None:
    teacher = Teacher(base())
    tokens, mask = ids(4, 20), torch.ones(4, 20, dtype=torch.bool)
    mask[:, :3] = False
    routers = routers_of(teacher.shape)
    objective = RouterObjective(teacher, routers)
    optimizer = torch.optim.AdamW(routers.parameters(), lr=0.03)
    divergence, predicting = [], []
    for _ in range(30):
        loss, report = objective(tokens, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        divergence.append(float(report.result.kl.detach()))
        predicting.append(report.loss - divergence[-1])
    assert divergence[-1] < 0.95 * divergence[0]
    assert predicting[-1] < 0.8 * predicting[0]


@torch.no_grad()
def test_routers_start_from_what_their_blocks_do() -> None:
    teacher = Teacher(base())
    routers = routers_of(teacher.shape)
    batch = ids(8, 24), torch.ones(8, 24, dtype=torch.bool), None
    start_from_updates(teacher, routers, [batch])
    slow = teacher.slow(batch[0], shared=0, gates=(1, 2, 3, 4))
    for which, block in enumerate(BLOCKS):
        before, after = slow.residual[block], slow.residual[block + 1]
        turned = 1 - torch.cosine_similarity(before, after, dim=-1)
        told = routers.weight(which, before)
        assert torch.corrcoef(torch.stack([turned.flatten(), told.flatten()]))[0, 1] > 0.5


def test_what_it_cannot_use_is_refused() -> None:
    shape = BaseShape.of(LLAMA)
    assert MixtureOfDepthsConfig.for_base(shape).blocks == (1, 3)
    for blocks in ([], [4], [-1], [2, 1]):
        with pytest.raises(UserError, match="blocks"):
            MixtureOfDepthsConfig.for_base(shape, blocks=blocks)
    for capacity in (0.0, 1.0):
        with pytest.raises(UserError, match="capacity"):
            MixtureOfDepthsConfig.for_base(shape, capacity=capacity)
    with pytest.raises(UserError, match=r"threshold.*null or a number from 0 to 1"):
        MixtureOfDepthsDecodeConfig(threshold=1.5)
    sizes = {k: getattr(LLAMA, k) for k in ("vocab_size", "hidden_size", "intermediate_size")}
    windowed = model_of(
        MistralConfig(
            **sizes,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=8,
        )
    )
    teacher = Teacher(windowed)
    with pytest.raises(UserError, match="block 1 has a sliding window"):
        RouterObjective(teacher, routers_of(teacher.shape))
