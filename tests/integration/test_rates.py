import random

import pytest

from multirate.decoding.speculate.acceptance_statistics import per_token_rate


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.62, 0.9, 1.0])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_per_token_rate_is_recovered_from_chains(rate: float, length: int) -> None:
    assert per_token_rate(
        sum(rate**depth for depth in range(1, length + 1)), length
    ) == pytest.approx(rate, abs=1e-6)


def test_per_token_rate_from_simulated_chains() -> None:
    generator = random.Random(0)
    accepted = 0
    for _ in range(20000):
        for _ in range(4):
            if generator.random() > 0.7:
                break
            accepted += 1
    assert per_token_rate(accepted / 20000, 4) == pytest.approx(0.7, abs=0.01)
