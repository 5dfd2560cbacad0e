"""Offloaded experts give the model's logits, bit-identical over policies, budgets and predictors,
right or wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multirate.experts.layout import ALIGNMENT
from multirate.experts.model import OffloadedExperts, load_without_experts
from multirate.experts.pack import pack
from multirate.experts.predictors import Predictor
from multirate.experts.runtime import ExpertSettings
from multirate.experts.store import ExpertStore

from .tiny import EXPERTS, FAMILIES, TOP_K, save

RECORDS = 3 * EXPERTS


@pytest.fixture(scope="module", params=FAMILIES)
def offloaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    original = save(request.param, folder)
    pack(folder, folder / "experts")
    store = ExpertStore.open(folder / "experts")
    model = load_without_experts(folder)
    offload = OffloadedExperts(model, store)
    yield original, model, offload
    offload.remove()


IDS = torch.tensor([[5, 9, 2, 44, 17, 30, 8, 8, 21], [3, 4, 50, 6, 7, 7, 60, 9, 10]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        first = model(IDS[:, :6], use_cache=True)
        pieces, cache = [first.logits], first.past_key_values
        for at in range(6, IDS.shape[1]):
            step = model(IDS[:, at : at + 1], past_key_values=cache, use_cache=True)
            pieces.append(step.logits)
            cache = step.past_key_values
    return torch.cat(pieces, 1)


def test_logits_are_the_models_own(offloaded: Any) -> None:
    original, model, offload = offloaded
    offload.use()
    torch.testing.assert_close(logits(model), logits(original), atol=2e-5, rtol=1e-4)


def test_autocast_is_followed(offloaded: Any) -> None:
    """As transformers' own experts do: products in its dtype, added up in the stream's."""
    original, model, offload = offloaded
    offload.use()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(logits(model), logits(original), atol=0.1, rtol=0.1)


def test_no_expert_weight_is_in_the_model(offloaded: Any) -> None:
    _, model, _ = offloaded
    for name, parameter in model.named_parameters():
        assert parameter.is_meta == (".experts." in name), name


class Wrong(Predictor):
    """Always names what is not needed next, at every later row."""

    def predict(self, row: int, residual: torch.Tensor) -> list[Any]:
        from multirate.experts.loader import Prediction

        return [Prediction((r, e), r, 1.0) for r in range(row + 1, 3) for e in range(EXPERTS)]


@pytest.mark.parametrize("slots", [TOP_K + 1, TOP_K * 3 - 1, TOP_K * 3, RECORDS])
@pytest.mark.parametrize("eviction", ["none", "lru", "lrfu", "least_stale"])
@pytest.mark.parametrize(
    "predictor", ["none", "previous_token", "popularity", "next_layer_gate", Wrong()]
)
def test_bits_do_not_depend_on_what_is_loaded_when(
    offloaded: Any, slots: int, eviction: str, predictor: Any
) -> None:
    """The prefill needs more experts than the smallest cache holds; the batch has two sequences."""
    _, model, offload = offloaded
    offload.use()
    resident = logits(model)
    record = offload.store.index.record.bytes
    runtime = offload.use(ExpertSettings(slots * record, eviction), predictor)
    for view in runtime.memory.slots:
        view.fill_(0xFF)  # bf16 and fp32 NaN: an unread slot would be seen
    for _ in range(2):
        assert torch.equal(logits(model), resident)
    stats = runtime.stats
    assert stats.uses > 0 and stats.hits <= stats.uses and not stats.errors
    if eviction == "none" and predictor == "none":
        assert not stats.hits
    if slots == RECORDS and eviction != "none":
        assert stats.bytes <= RECORDS * record
    assert stats.bytes % ALIGNMENT == 0


def test_loading_does_not_follow_torch_s_default_device(tmp_path: Path) -> None:
    original = save(next(iter(FAMILIES)), tmp_path)
    with torch.device("meta"):
        model = load_without_experts(tmp_path)
    want = original.state_dict()
    for name, parameter in model.named_parameters():
        assert parameter.is_meta if ".experts." in name else parameter.equal(want[name]), name
