"""Rotary tables are as long as texts are, whatever context a configuration claims."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Ministral3Config, Phi3Config

from multirate import attach
from multirate.runtime.load import load_decoder
from multirate.runtime.native import NativeDecoder, positions
from multirate.runtime.native.positions import PositionTables, Tables
from multirate.runtime.rows import Rows

SIZES = dict(
    vocab_size=133,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    pad_token_id=0,
)
SCALED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, max_position_embeddings=64),
    "scaled queries": Ministral3Config(
        **SIZES, head_dim=64, max_position_embeddings=64, rope_parameters=SCALED
    ),
}


def decoder_of(config: object) -> NativeDecoder:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    decoder = load_decoder(model, "native")
    assert isinstance(decoder, NativeDecoder)
    return decoder


def last_logits(decoder: NativeDecoder, tokens: list[int]) -> torch.Tensor:
    """After reading them one by one, into a cache that is too small at first."""
    cache = decoder.new_cache(1, 16)
    for place, token in enumerate(tokens):
        hidden = decoder.first_layers([token], Rows.causal(0, place, 1), 2, cache)
        cache.commit(0, 1)
    return decoder.logits(hidden)


def angles(at: torch.Tensor) -> Tables:
    angle = at[:, None].float() * torch.tensor([1.0, 0.3, 0.01])
    return {None: {"cos": angle.cos(), "sin": angle.sin()}}


def table(tables: PositionTables, name: str, count: int) -> list[float]:
    return list(getattr(tables.packed[None], name)[0 : 3 * count])


@pytest.mark.parametrize("claimed", [1 << 20, 1 << 40])
def test_a_claimed_context_takes_no_memory(claimed: int) -> None:
    """No table of it either: the kernel has no limit of its own."""
    decoder = decoder_of(LlamaConfig(**SIZES, head_dim=128, max_position_embeddings=claimed))
    assert decoder.info.max_positions == claimed
    assert decoder.positions.nbytes <= 1 << 20
    cache = decoder.new_cache(1, 3000)
    assert 3000 <= decoder.positions.count <= 4096
    cache.make_room_to(5000)
    assert decoder.positions.count > 5000


@pytest.mark.parametrize("name", CONFIGS)
def test_results_do_not_depend_on_when_tables_grew(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(1, 133, (60,)).tolist()
    expected = last_logits(decoder_of(CONFIGS[name]), tokens)
    monkeypatch.setattr(positions, "BLOCK", 8)
    decoder = decoder_of(CONFIGS[name])
    assert decoder.positions.count < 60
    assert torch.equal(last_logits(decoder, tokens), expected)
    assert decoder.positions.count >= 60


def test_whoever_holds_the_tables_reads_the_longer_ones() -> None:
    tables, at_once = PositionTables(angles), PositionTables(angles)
    held, before = tables.packed[None], table(tables, "sin", 100)
    for count in (1500, 1501, 9000):
        tables.reach(count)
    at_once.reach(9000)
    assert tables.packed[None] is held and table(tables, "sin", 100) == before
    for name in ("cos", "sin"):
        assert table(tables, name, 9000) == table(at_once, name, 9000)
    expected = angles(torch.arange(9000))[None]["sin"].flatten().numpy()
    np.testing.assert_allclose(table(tables, "sin", 9000), expected, atol=1e-6)


def test_angles_are_not_asked_for_where_they_change() -> None:
    """longrope has others for a whole call with a position beyond the original length."""
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "long_factor": [9.0 + i for i in range(32)],
        "short_factor": [1.0 + i / 8 for i in range(32)],
        "original_max_position_embeddings": 16,
    }
    config = Phi3Config(
        **SIZES,
        eos_token_id=None,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters=longrope,
    )
    decoder = decoder_of(config)
    assert decoder.info.max_positions == 16
    decoder.new_cache(1, 3000)
    cos = np.array(list(decoder.positions.packed[None].cos[0 : 16 * 32])).reshape(16, 32)
    rotary = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).model.rotary_emb
    short, _ = rotary(torch.zeros(1), torch.arange(16)[None])
    np.testing.assert_allclose(cos, short[0, :, :32].numpy(), atol=1e-6)
    long, _ = rotary(torch.zeros(1), torch.arange(17)[None])
    assert np.abs(cos - long[0, :16, :32].numpy()).max() > 0.1


def test_drafts_with_a_layer_of_their_own_go_on_where_tables_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(positions, "BLOCK", 8)
    engine = attach("tiny", "m2r2-carry")
    prompt, stop = [5, 17, 42, 99, 5, 17, 42], engine.stopping(90)
    plain = engine.generate([prompt], stop=stop, speculate="never").sequences
    assert engine.generate([prompt], stop=stop, speculate="always").sequences == plain
