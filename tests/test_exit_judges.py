"""What benchmarks/exit_judges.py computes of a judge's scores, against what is known of them."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from script_file import load_script


@pytest.fixture(scope="module")
def judges() -> ModuleType:
    return load_script("benchmarks/exit_judges.py")


def test_the_surest_leave_first_as_long_as_enough_is_kept(judges: ModuleType) -> None:
    score = torch.tensor([0.9, 0.1, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.0])
    agree = torch.tensor([True, True, True, False, True, True, False, True, True, True])
    assert judges.leaving(score, agree, 1.0) == pytest.approx(0.2)
    assert judges.leaving(score, agree, 0.9) == pytest.approx(0.5)  # one of ten may be wrong
    assert judges.leaving(score, agree, 0.8) == 1.0
    assert judges.leaving(agree.float(), agree, 1.0) == pytest.approx(0.8)  # an oracle


def test_the_area_under_the_curve(judges: ModuleType) -> None:
    torch.manual_seed(0)
    agree = torch.rand(20_000) < 0.6
    assert judges.exact_auc(agree.float(), agree) == pytest.approx(1.0, abs=0.01)
    assert judges.exact_auc(torch.randn(20_000), agree) == pytest.approx(0.5, abs=0.02)
    # of two normal distributions one standard deviation apart it is Phi(1 / sqrt 2)
    shifted = torch.randn(20_000) + agree.float()
    assert judges.exact_auc(shifted, agree) == pytest.approx(0.7602, abs=0.01)
    assert judges.exact_auc(shifted, torch.ones(20_000, dtype=torch.bool)) is None


def test_scores_together_know_what_they_know_apart(judges: ModuleType) -> None:
    torch.manual_seed(1)
    first, second = torch.randn(2, 4_000)
    agree = first + second + 0.5 * torch.randn(4_000) > 0
    half = 2_000
    joint = judges.combined(
        (first[:half], second[:half]), agree[:half], (first[half:], second[half:])
    )
    alone = judges.exact_auc(first[half:], agree[half:])
    assert judges.exact_auc(joint, agree[half:]) > alone + 0.1
    assert ((joint > 0.5) == agree[half:]).float().mean() > 0.85
