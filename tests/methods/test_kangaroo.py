"""Kangaroo: training computes what drafting computes; drafting loses nothing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from native_kernel import skip_without_kernel
from traces import trace
from transformers import LlamaConfig, LlamaForCausalLM

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.session import Session
from multirate.decoding.speculate import budget as draft_length
from multirate.decoding.speculate.costs import CostModel
from multirate.decoding.speculate.drafter import Draft, DraftRequest
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.speculate.step_costs import StepCosts
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.methods._shared.draft_runner import PackedRunner
from multirate.methods._shared.shape import BaseShape
from multirate.methods._shared.teacher import Teacher
from multirate.methods.kangaroo.config import KangarooConfig
from multirate.methods.kangaroo.decode import KangarooDecodeConfig, KangarooDrafter
from multirate.methods.kangaroo.modules import KangarooAdapter
from multirate.methods.kangaroo.runner import KangarooRunner, make_runner
from multirate.methods.kangaroo.train import KangarooObjective, start_from_least_squares
from multirate.runtime.draft_branch import DraftWeights
from multirate.runtime.fused import FusedStep
from multirate.runtime.load import load_decoder
from multirate.runtime.native import NativeDecoder
from multirate.runtime.rows import Rows

from .fused_steps import assert_fused_steps_are_steps_in_parts
from .tiny import base, disturb, ids


def build(exit_layer: int = 2) -> tuple[Teacher, KangarooAdapter]:
    teacher = Teacher(base())
    return teacher, KangarooAdapter(
        KangarooConfig.for_base(teacher.shape, exit_layer=exit_layer), teacher.shape
    )


def reduced(shape: BaseShape) -> KangarooAdapter:
    """Drafts every third token only."""
    adapter = KangarooAdapter(KangarooConfig.for_base(shape, draft_vocab=20), shape)
    assert adapter.draft_tokens is not None
    adapter.draft_tokens.copy_(torch.arange(20) * 3)
    return adapter


def test_untrained_adapter_is_the_early_exit() -> None:
    teacher, adapter = build()
    hidden = trace(teacher.parts, ids(2, 9))[0][2]
    torch.testing.assert_close(
        teacher.norm(adapter(hidden)), teacher.norm(hidden), atol=1e-3, rtol=1e-3
    )


def test_rows_equal_the_training_pass() -> None:
    teacher, adapter = build()
    disturb(adapter)
    x = trace(teacher.parts, ids(1, 9))[0][2]
    with torch.no_grad():
        cache = adapter.attn.new_cache(1, 2)
        got = torch.cat(
            [
                adapter.rows(x[0, :5], Rows.causal(0, 0, 5), cache),
                *(adapter.rows(x[0, i : i + 1], Rows.causal(0, i, 1), cache) for i in range(5, 9)),
            ]
        )
        torch.testing.assert_close(got, adapter(x)[0], atol=1e-5, rtol=1e-5)


def test_loss_falls_to_zero_when_the_exit_is_the_end() -> None:
    """A KL that is zero exactly when the adapter's distribution is the model's: layer norms alone
    cannot hide it.
    """
    teacher, adapter = build(exit_layer=3)
    objective = KangarooObjective(teacher, adapter)
    tokens = ids(2, 8)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    slow = teacher.slow(tokens, 0, (3,))
    loss, report = objective(tokens, mask)
    p = teacher.head.logits(slow.normed).log_softmax(-1)
    q = teacher.head.logits(teacher.norm(adapter(slow.residual[3]))).log_softmax(-1)
    torch.testing.assert_close(loss, (p.exp() * (p - q)).sum(-1).mean(), atol=1e-4, rtol=1e-4)
    assert report.result.agree.shape == (1, tokens.numel())


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0])
def test_greedy_equals_plain_decoding_and_the_adapter_cache_has_no_holes(threshold: float) -> None:
    teacher, adapter = build()
    disturb(adapter, 0.02)
    decoder = load_decoder(teacher.parts.model, "hf")
    drafter = KangarooDrafter(
        decoder, adapter, KangarooDecodeConfig(threshold=threshold, max_draft=4)
    )
    prompts = [ids(1, n, seed=n)[0].tolist() for n in (3, 7, 5)]
    stop = StopSettings(max_new_tokens=23)

    def check(session: Session, step: Step) -> None:
        """What drafts read of committed tokens is what one pass over the true tokens gives; all but
        what waits for the next draft.
        """
        own = drafter.runner._own
        assert own is not None
        for b in session.active:
            text, pending = session.sampler.tokens[b], drafter._reading.pending.get(b)
            length = session.cache.lengths[b] - (len(pending.ids) if pending else 0)
            hidden = trace(teacher.parts, torch.tensor([text[:length]]))[0][2]
            _, k, v = adapter.attn.project(adapter.norm(hidden), torch.arange(length))
            for held, true in ((own.keys[0], k), (own.values[0], v)):
                torch.testing.assert_close(
                    held[b, :, :length], true[0, :, :length], atol=1e-4, rtol=1e-3
                )

    got = generate(decoder, SpeculativeStep(drafter), prompts, stop=stop, after_step=check)
    plain = generate(decoder, PlainStep(), prompts, stop=stop)
    assert got.sequences == plain.sequences
    assert got.stats.drafted > 0
    if threshold == 1.0:
        assert got.stats.drafted <= got.stats.target_passes * len(
            prompts
        )  # every draft stops after its first token


def test_whole_drafts_are_accepted_where_the_exit_is_the_model() -> None:
    """With deeper layers silenced."""
    model = base()
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    teacher = Teacher(model)
    adapter = KangarooAdapter(KangarooConfig.for_base(teacher.shape, exit_layer=2), teacher.shape)
    decoder = load_decoder(model, "hf")
    drafter = KangarooDrafter(decoder, adapter, KangarooDecodeConfig(threshold=0.0, max_draft=3))
    out = generate(
        decoder,
        SpeculativeStep(drafter),
        [ids(1, 4)[0].tolist()],
        stop=StopSettings(max_new_tokens=25),
    )
    assert out.stats.tokens_per_step > 3.5
    assert (
        out.sequences
        == generate(
            decoder, PlainStep(), [ids(1, 4)[0].tolist()], stop=StopSettings(max_new_tokens=25)
        ).sequences
    )


def test_sampled_text_is_plain_decodings() -> None:
    teacher, adapter = build()
    decoder = load_decoder(teacher.parts.model, "hf")
    drafter = KangarooDrafter(decoder, adapter, KangarooDecodeConfig(threshold=0.05, max_draft=4))
    sampling, stop = SamplingSettings(temperature=1.0, seed=4), StopSettings(max_new_tokens=12)
    out = generate(decoder, SpeculativeStep(drafter), [[3, 4, 5], [6]], sampling, stop)
    plain = generate(decoder, PlainStep(), [[3, 4, 5], [6]], sampling, stop)
    assert out.sequences == plain.sequences
    assert [len(s) for s in out.sequences] == [12, 12]


def native_base() -> tuple[NativeDecoder, BaseShape]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=128,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
        )
    ).bfloat16()
    skip_without_kernel()
    return NativeDecoder(model), BaseShape.of(model.config)


def test_runs_on_the_native_decoder_in_bf16() -> None:
    """The kernel's residuals are fp32 while the adapter is loaded in the model's bf16."""
    decoder, shape = native_base()
    adapter = KangarooAdapter(KangarooConfig.for_base(shape), shape).bfloat16()
    drafter = KangarooDrafter(decoder, adapter, KangarooDecodeConfig(threshold=0.0))
    stop = StopSettings(max_new_tokens=20)
    plain = generate(decoder, PlainStep(), [[3, 4, 5], [9]], stop=stop)
    assert (
        generate(decoder, SpeculativeStep(drafter), [[3, 4, 5], [9]], stop=stop).sequences
        == plain.sequences
    )


@pytest.mark.parametrize("packed, error", [("bf16", 0.03), ("int8", 0.1)])
def test_the_native_runner_is_the_runner(packed: DraftWeights, error: float) -> None:
    decoder, shape = native_base()
    adapter = KangarooAdapter(KangarooConfig.for_base(shape), shape)
    disturb(adapter)
    native, plain = make_runner(decoder, adapter, packed), KangarooRunner(decoder, adapter)
    assert isinstance(native, PackedRunner)
    tokens = ids(1, 11)[0].tolist()
    exits, outputs = [], []
    for runner in (plain, native):
        runner.begin(decoder.new_cache(1, 16))
        runner.slow(tokens[:6], Rows.causal(0, 0, 6))  # committed; the adapter has not read them
        made = []
        for begin, end, fresh in ((0, 6, 0), (6, 7, 1), (7, 11, 4)):
            rows = Rows.causal(0, begin, end - begin)
            h, p = runner.step(tokens[begin:end], rows, None, fresh)
            made.append((h, p[len(p) - fresh :]))  # of the others keys and values are what counts
        exits.append(torch.cat([h for h, _ in made]))
        outputs.append(torch.cat([p for _, p in made]))
    torch.testing.assert_close(exits[1], exits[0], atol=0.03, rtol=0.02)
    torch.testing.assert_close(outputs[1], outputs[0], atol=error, rtol=0.02)
    logits = decoder.logits(outputs[1])
    best, sure = native.top(outputs[1], 1)
    drafted, confidence = [row[0] for row in best], [row[0] for row in sure]
    probs = logits.softmax(-1)
    if packed == "bf16":
        assert drafted == logits.argmax(-1).tolist()
    # an int8 head may prefer another token that the exact one thinks nearly as likely
    likeliest, chosen = probs.amax(-1), probs[range(len(drafted)), drafted]
    allowed = {"bf16": 1e-4, "int8": 0.05}[packed]
    assert chosen.tolist() == pytest.approx(likeliest.tolist(), rel=allowed)
    assert confidence == pytest.approx(chosen.tolist(), rel=allowed)


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "sampling",
    [None, SamplingSettings(1.0, seed=2), SamplingSettings(1.0, top_p=0.95, seed=2)],
)
@pytest.mark.parametrize("whole_head", [True, False])
def test_a_round_in_one_kernel_call_is_the_round_in_parts(
    threshold: float, seed: int, sampling: SamplingSettings | None, whole_head: bool
) -> None:
    decoder, shape = native_base()
    adapter = (
        KangarooAdapter(KangarooConfig.for_base(shape), shape) if whole_head else reduced(shape)
    )
    disturb(adapter, seed=seed)
    settings = KangarooDecodeConfig(threshold=threshold, max_draft=5)
    assert_fused_steps_are_steps_in_parts(
        decoder,
        lambda: KangarooDrafter(decoder, adapter, settings),
        [3, 4, 5 + seed],
        new_tokens=16,
        sampling=sampling,
    )


@pytest.mark.parametrize(
    "sampling", [None, SamplingSettings(1.0, seed=2), SamplingSettings(repetition_penalty=1.3)]
)
@pytest.mark.parametrize("backend", ["native", "hf"])
def test_a_reduced_head_drafts_its_tokens_only(
    backend: str, sampling: SamplingSettings | None
) -> None:
    native, shape = native_base()
    adapter = reduced(shape)
    disturb(adapter)
    decoder = native if backend == "native" else load_decoder(base(), "hf")
    if backend == "hf":
        adapter = reduced(BaseShape.of(base().config))
    drafter = KangarooDrafter(decoder, adapter, KangarooDecodeConfig(threshold=0.0, max_draft=4))
    drafted: set[int] = set()

    def look(session: Session, step: Step) -> None:
        for seq in range(len(session.prompts)):
            if drafter._fused is not None and seq in drafter._fused:
                drafted.update(drafter._fused.nodes(seq).tokens)

    prompts = [[3, 4, 5]] if backend == "native" else [[3, 4, 5], [6]]
    stop = StopSettings(max_new_tokens=20)
    drafts: list[list[int]] = []
    draft = drafter.draft

    def noted(*args: Any) -> list[Draft]:
        made = draft(*args)
        drafts.extend(list(one.tokens) for one in made)
        return made

    drafter.draft = noted  # type: ignore[method-assign]
    out = generate(decoder, SpeculativeStep(drafter), prompts, sampling, stop, after_step=look)
    plain = generate(decoder, PlainStep(), prompts, sampling, stop)
    assert out.sequences == plain.sequences
    drafted |= {token for tokens in drafts for token in tokens}
    assert drafted and all(token % 3 == 0 for token in drafted)


def test_training_starts_where_each_channel_tells_the_final_direction_best() -> None:
    """No other weight of a channel has a smaller squared error, and the loss is below the early
    exit's.
    """
    teacher, adapter = build()
    tokens = [ids(3, 12, seed=seed) for seed in range(6)]
    mask = torch.ones_like(tokens[0], dtype=torch.bool)
    mask[:, :4] = False
    before = [KangarooObjective(teacher, adapter)(t, mask)[1].loss for t in tokens]
    start_from_least_squares(teacher, adapter, [(t, mask, None) for t in tokens])
    after = [KangarooObjective(teacher, adapter)(t, mask)[1].loss for t in tokens]
    assert sum(after) < sum(before)
    read, wanted = [], []
    for t in tokens:
        slow = teacher.slow(t, 0, (2,))
        read.append(torch.nn.functional.normalize(slow.residual[2][mask], dim=-1))
        wanted.append(torch.nn.functional.normalize(slow.final[mask], dim=-1))
    x, y = torch.cat(read), torch.cat(wanted)
    best = torch.stack(
        [
            torch.linalg.lstsq(x[:, i : i + 1], y[:, i : i + 1]).solution[0, 0]
            for i in range(x.shape[1])
        ]
    )
    torch.testing.assert_close(adapter.norm_out.weight.detach(), best, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("prompts", [[[3, 4, 5]], [[3, 4, 5], [9]]])
def test_a_step_that_adapts_leaves_a_useless_adapter_alone(
    monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]]
) -> None:
    """Steps take what their costs say."""
    steps, spent = itertools.count(), [0.0]
    monkeypatch.setattr(draft_length, "now", lambda: next(steps) + spent[0])
    decoder, shape = native_base()
    adapter = KangarooAdapter(KangarooConfig.for_base(shape), shape)
    disturb(adapter)
    drafter = KangarooDrafter(decoder, adapter, KangarooDecodeConfig(threshold=0.0))
    costs = StepCosts(1.0, {1: 1.0, 16: 2.0}, 0.1, 0.05)
    drafter._costs = CostModel(costs)
    draft, fused = drafter.draft, drafter.fused_steps

    def drafting(request: DraftRequest) -> list[Draft]:
        made = draft(request)
        longest = max(len(one.tokens) for one in made)
        spent[0] += costs.step_seconds(longest, len(made)) - 1
        return made

    def whole(*arguments: Any) -> list[FusedStep] | None:
        done = fused(*arguments)
        if done is not None:
            spent[0] += costs.step_seconds(max(one.drafted for one in done), len(done)) - 1
        return done

    monkeypatch.setattr(drafter, "draft", drafting)
    monkeypatch.setattr(drafter, "fused_steps", whole)
    stop, step = StopSettings(max_new_tokens=100), SpeculativeStep(drafter)
    plain = generate(decoder, PlainStep(), prompts, stop=stop)
    drafted = []
    for on in (False, True):
        assert step.adapt(decoder, on) == on
        out = generate(decoder, step, prompts, stop=stop)
        assert out.sequences == plain.sequences
        drafted.append(out.stats.drafted / out.stats.sequence_steps)
    assert drafted[0] > 3 and drafted[1] < 0.3 * drafted[0]
