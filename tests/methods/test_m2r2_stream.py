"""The accelerated stream: it starts as the base's early exit, and training computes what drafting
computes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from traces import trace

from multirate.methods._shared.teacher import Teacher
from multirate.methods.m2r2.config import M2R2Config
from multirate.methods.m2r2.modules import AcceleratedStream
from multirate.methods.m2r2.train import M2R2Objective
from multirate.runtime.load import load_decoder
from multirate.runtime.rows import Rows

from .tiny import base, disturb, ids


def build(
    name: str, preset: str, **options: object
) -> tuple[Teacher, AcceleratedStream, M2R2Objective]:
    teacher = Teacher(base(name))
    torch.manual_seed(5)
    stream = AcceleratedStream(M2R2Config.for_base(teacher.shape, preset, **options), teacher.shape)
    return teacher, stream, M2R2Objective(teacher, stream)


@pytest.mark.parametrize("preset", ["m2r2", "m2r2-carry"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "gpt2", "mixtral"])
def test_untrained_stream_is_the_early_exit(name: str, preset: str) -> None:
    teacher, stream, objective = build(
        name, preset, rank=4, **({"mlp_adapter": "parallel"} if name == "gpt2" else {})
    )
    tokens = ids(2, 11)
    reference = trace(teacher.parts, tokens)[0]  # h_i of the base, computed without any of this
    slow = objective.slow(tokens)
    outputs, _ = objective.first_step(slow)
    for gate, output in zip(stream.config.gates, outputs, strict=True):
        # as the head reads them: a fusion leaves the direction alone, and the norm of it
        torch.testing.assert_close(
            teacher.norm(output), teacher.norm(reference[gate]), atol=4e-3, rtol=2e-3
        )
        if not stream.fusions:
            torch.testing.assert_close(output, reference[gate], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(slow.final, reference[-1], atol=1e-5, rtol=1e-5)
    model_logits = teacher.parts.model(tokens).logits
    torch.testing.assert_close(teacher.head.logits(slow.normed), model_logits, atol=2e-4, rtol=1e-4)


def test_reinitialised_gates_do_not_depend_on_earlier_adapters() -> None:
    tokens = ids(2, 9)
    for reinitialise in (True, False):
        _, stream, objective = build(
            "llama", "m2r2", rank=4, gates=[1, 3], reinitialise=reinitialise
        )
        before = objective.first_step(objective.slow(tokens))[0]
        disturb(stream.adapters["0"])
        after = objective.first_step(objective.slow(tokens))[0]
        assert not torch.allclose(before[0], after[0], atol=1e-3)
        assert torch.equal(before[1], after[1]) is reinitialise


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gates": [2], "block": False},
        {"gates": [1], "taps": [2, 3]},
        {"gates": [2], "mlp_adapter": "parallel", "attention_adapter": False},
    ],
)
@torch.no_grad()
def test_training_steps_compute_what_drafting_computes(options: dict[str, object]) -> None:
    """For every root, draft S tokens ahead one row at a time on a Decoder; compare with the
    one-pass training steps.
    """
    steps, length = 4, 10
    teacher, stream, objective = build("llama", "m2r2-carry", rank=4, unroll_steps=steps, **options)
    disturb(stream)
    gate = stream.config.gates[0]
    tokens = ids(1, length)
    slow = objective.slow(tokens)
    outputs, kv = objective.first_step(slow)
    earlier = [kv] if kv is not None else []
    for _ in range(1, steps):
        own, kv = objective.next_step(slow, outputs[-1], earlier)
        earlier += [kv] if kv is not None else []
        outputs.append(own)

    decoder = load_decoder(teacher.parts.model, "hf")
    cache = decoder.new_cache(1, length)
    every = Rows.causal(0, 0, length)
    x = decoder.embed(tokens[0], every.pos)
    final, inner = decoder.layers_with_taps(x, every, 0, 4, cache, stream.config.taps)
    final = stream.carried(final, inner)
    block = stream.block(gate)
    own_cache = block.attn.new_cache(1, length) if block is not None else None

    def draft_row(position: int, carried: torch.Tensor) -> torch.Tensor:
        at = np.array([position], np.int32)
        x = stream.start(decoder.embed(tokens[0, position : position + 1], at), carried[None])
        x = decoder.layers(
            x, Rows.accelerated_at(0, [position]), 0, gate, cache, stream.layer_adapters()
        )
        x = stream.fuse(gate, x, carried[None])
        if block is not None:
            x = block.rows(x, Rows.causal(0, position, 1), own_cache)
        return x[0]

    for root in range(length - steps + 1):
        # the root's row has the true carried residual; it stays in the block's cache for later
        # roots
        carried = final[root - 1] if root else torch.zeros_like(final[0])
        for s in range(steps):
            carried = draft_row(root + s, carried)
            torch.testing.assert_close(outputs[s][0, root + s], carried, atol=2e-4, rtol=1e-3)
        for s in range(
            1, steps
        ):  # as after acceptance: the drafted slots are backfilled by true rows before use
            draft_row(root + s, final[root + s - 1])
    assert not torch.allclose(
        outputs[0][0, 5:], outputs[-1][0, 5:], atol=1e-2
    )  # the steps do differ


def test_features_and_noise_count_where_they_are_asked_for() -> None:
    """SmoothL1 beside the KL, by its weight; noise in training alone, the same for a batch whenever
    it comes.
    """
    tokens = ids(2, 11)
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    losses = {}
    for weight, noise in ((0.0, 0.0), (1.0, 0.0), (10.0, 0.0), (10.0, 0.2)):
        _, stream, objective = build(
            "llama", "m2r2-carry", rank=4, arla_dim=0, feature_weight=weight, noise=noise
        )
        disturb(stream)
        noisy, again = (objective.train()(tokens, mask)[1].loss for _ in range(2))
        losses[weight, noise] = objective.eval()(tokens, mask)[1].loss
        assert noisy == again
        assert (noisy != losses[weight, noise]) is (noise > 0)
    alone = losses[0.0, 0.0]
    assert losses[10.0, 0.2] == losses[10.0, 0.0]
    assert losses[10.0, 0.0] - alone == pytest.approx(10 * (losses[1.0, 0.0] - alone), rel=1e-3)
    assert losses[1.0, 0.0] > alone


def test_block_rows_see_only_their_tree_path() -> None:
    _, stream, _ = build("llama", "m2r2-carry", rank=4)
    disturb(stream)
    block = stream.block(1)
    assert block is not None
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        cache = block.attn.new_cache(1, 3)  # grows by itself
        block.rows(x[:2], Rows.causal(0, 0, 2), cache)
        tree = Rows.draft_tree(
            0, 2, [0, 0, 1]
        )  # root at slot 2; nodes 1, 2 below it; node 3 below node 1
        got = block.rows(x[2:], tree, cache)
        chain = block(x[[0, 1, 2, 3, 5]][None])[0][0]
        other = block(x[[0, 1, 2, 4]][None])[0][0]
    torch.testing.assert_close(got[[0, 1, 3]], chain[2:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[2], other[3], atol=1e-5, rtol=1e-5)


def test_only_the_stream_is_trained_and_every_part_gets_a_gradient() -> None:
    for preset in ("m2r2", "m2r2-carry"):
        teacher, stream, objective = build("llama", preset, rank=4)
        disturb(stream)
        assert {id(p) for p in objective.parameters()} == {id(p) for p in stream.parameters()}
        tokens = ids(2, 12)
        loss, report = objective(tokens, torch.ones_like(tokens, dtype=torch.bool))
        loss.backward()
        silent = [
            n for n, p in stream.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0
        ]
        # with one gate ARLA attends to a single latent: its query and key cannot matter
        assert set(silent) <= (
            {"arla.q.weight", "arla.k.weight"} if preset == "m2r2-carry" else set()
        )
        assert all(p.grad is None for p in teacher.parts.model.parameters())
        assert report.result.kl.shape == (len(objective.terms),)


def test_padding_changes_nothing() -> None:
    _, stream, objective = build("llama", "m2r2-carry", rank=4)
    disturb(stream)
    tokens = ids(1, 8)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    padded = torch.cat([tokens, torch.zeros(1, 5, dtype=torch.long)], dim=1)
    padded_mask = torch.cat([mask, torch.zeros(1, 5, dtype=torch.bool)], dim=1)
    torch.testing.assert_close(
        objective(tokens, mask)[0], objective(padded, padded_mask)[0], atol=1e-5, rtol=1e-5
    )
