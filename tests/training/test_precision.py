"""The precision of a training run: bf16 only where it is faster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from multirate.training import precision


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    precision._bf16_is_faster.cache_clear()
    yield
    precision._bf16_is_faster.cache_clear()


@pytest.mark.parametrize(
    ("bf16", "chosen"),
    [(0.5, torch.bfloat16), (0.95, torch.float32), (2.0, torch.float32)],
)
def test_a_processor_with_bf16_products_uses_them_where_they_are_faster(
    monkeypatch: pytest.MonkeyPatch, bf16: float, chosen: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    taken = {torch.bfloat16: bf16, torch.float32: 1.0}
    monkeypatch.setattr(precision, "_seconds", lambda dtype: taken[dtype])
    assert precision.low_precision(torch.device("cpu")) == chosen


def test_a_processor_without_bf16_products_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    monkeypatch.delattr(precision, "_seconds")
    assert precision.low_precision(torch.device("cpu")) == torch.float32
