"""A mixture on the native kernel: near its own forward, bit-identical over budgets, predictors and
batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from native_kernel import skip_without_kernel

from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.experts.model import PREDICTORS, OffloadedExperts
from multirate.experts.pack import pack
from multirate.experts.runtime import ExpertSettings
from multirate.experts.store import ExpertStore
from multirate.methods.spec import find
from multirate.runtime.load import load_decoder
from multirate.runtime.native.moe import NativeMoEDecoder
from multirate.runtime.rows import Rows

from .conftest import CONFIGS

PROMPTS = [[5, 9, 2, 44, 17, 30, 8], [3, 4, 50]]


def test_logits_are_the_models(mixture: Any) -> None:
    """Against fp32 of the same weights, at least as near as transformers' own bf16 forward."""
    original, offload, decoder = mixture
    ids = torch.tensor(PROMPTS[0])
    rows = Rows.causal(0, 0, len(ids))
    offload.use()
    ours = decoder.logits(
        decoder.layers(decoder.embed(ids, rows.pos), rows, 0, 4, decoder.new_cache(1, 32))
    )
    with torch.no_grad():
        exact = tf.AutoModelForCausalLM.from_config(original.config).eval()
        exact.load_state_dict(original.float().state_dict())
        true = exact(ids[None]).logits[0]
        rounded = original.bfloat16()(ids[None]).logits[0].float()
    assert (ours - true).norm() < max(1.5 * (rounded - true).norm(), 0.01 * true.norm())


@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("slots", [4, 9])
def test_bits_do_not_depend_on_what_is_loaded_when(
    mixture: Any, predictor: str, slots: int
) -> None:
    _, offload, decoder = mixture
    stop = StopSettings(max_new_tokens=14)
    offload.use()
    resident = generate(decoder, PlainStep(), PROMPTS, stop=stop).sequences
    alone = [generate(decoder, PlainStep(), [prompt], stop=stop).sequences[0] for prompt in PROMPTS]
    assert resident == alone, "a row depends on its neighbours"
    for eviction in ("none", "lru", "least_stale"):
        runtime = offload.use(
            ExpertSettings(slots * offload.store.index.record.bytes, eviction), predictor
        )
        for slot in runtime.memory.slots:
            slot.fill_(0xFF)
        assert generate(decoder, PlainStep(), PROMPTS, stop=stop).sequences == resident
        if predictor in ("next_layer_gate", "accelerated") and (slots > 4 or eviction == "none"):
            assert runtime.stats.issued > 0


def test_self_speculation_with_experts_on_disk(mixture: Any) -> None:
    """Verification of several rows uses the union of their experts."""
    _, offload, decoder = mixture
    stop = StopSettings(max_new_tokens=20)
    offload.use(ExpertSettings(4 * offload.store.index.record.bytes), "next_layer_gate")
    plain = generate(decoder, PlainStep(), PROMPTS, stop=stop).sequences
    for name, options in (
        ("layerskip", {"exit_layer": 3, "confidence": 0.0}),
        ("prompt_lookup", None),
    ):
        drafter = find(name).make_drafter(decoder, None, options)
        assert drafter is not None
        output = generate(decoder, SpeculativeStep(drafter), PROMPTS, stop=stop)
        assert output.sequences == plain
        assert name != "layerskip" or output.stats.accepted > 0


def test_the_models_own_layers_read_the_same_store(mixture: Any) -> None:
    original, offload, _ = mixture
    offload.use(ExpertSettings(4 * offload.store.index.record.bytes))
    hf = load_decoder(offload.model, "hf")
    rows = Rows.causal(0, 0, 7)
    ids = torch.tensor(PROMPTS[0])
    ours = hf.logits(hf.layers(hf.embed(ids, rows.pos), rows, 0, 4, hf.new_cache(1, 16)))
    with torch.no_grad():
        theirs = original.bfloat16()(ids[None]).logits[0].float()
    assert (ours - theirs).norm() < 0.03 * theirs.norm()


def test_backends(mixture: Any, tmp_path: Path) -> None:
    _, offload, _ = mixture
    with pytest.raises(UserError, match="accepted: auto"):
        offload.decoder("magic")
    folder = offload.store.folder.parent
    pack(folder, tmp_path / "plain", layout="module")
    other = OffloadedExperts(offload.model, ExpertStore.open(tmp_path / "plain"))
    with pytest.raises(UserError, match="--layout native"):
        other.decoder("native")


@pytest.mark.parametrize(
    "family, changes, why",
    [
        ("olmoe", {"clip_qkv": 8.0}, "clips its queries"),
        ("mixtral", {"hidden_act": "gelu"}, "silu"),
    ],
)
def test_what_the_kernel_does_not_compute_is_refused(
    family: str, changes: dict[str, Any], why: str
) -> None:
    skip_without_kernel()
    config = CONFIGS[family]()
    for told, reason in (({}, None), (changes, why)):
        for name, value in told.items():
            setattr(config, name, value)
        found = NativeMoEDecoder.supports(tf.AutoModelForCausalLM.from_config(config).bfloat16())
        assert found is None if reason is None else reason in str(found)
