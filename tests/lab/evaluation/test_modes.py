"""What goes together, and what a mode needs."""

from __future__ import annotations

import pytest

from multirate.engine import attach
from multirate.errors import UserError
from multirate.lab.evaluation.modes import Mode, decoding


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"name": "fast"}, "mode is 'fast'; accepted: full, speculative, dynamic"),
        ({"name": "full", "quality": 0.9}, "quality 0.9 needs mode 'dynamic'"),
        ({"name": "speculative", "threshold": 0.9}, "threshold 0.9 needs mode 'dynamic'"),
        ({"name": "dynamic"}, "either a quality or a threshold; given: neither"),
        ({"name": "dynamic", "quality": 0.9, "threshold": 0.9}, "quality 0.9 and threshold 0.9"),
        ({"name": "dynamic", "quality": 1.5}, "quality is 1.5"),
        ({"name": "dynamic", "threshold": float("nan")}, "threshold is nan"),
    ],
)
def test_what_does_not_go_together(values: dict[str, object], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        Mode(**values)  # type: ignore[arg-type]


def test_modes_of_an_engine() -> None:
    engine = attach("tiny")
    full = decoding(engine, Mode())
    assert (full.method, full.lossless) == ("autoregressive", True)
    with pytest.raises(UserError, match="needs an accelerator"):
        decoding(engine, Mode("speculative"))
    engine.add("m2r2-carry")
    speculative = decoding(engine, Mode("speculative"))
    assert (speculative.method, speculative.lossless) == ("m2r2-carry", True)
    dynamic = decoding(engine, Mode("dynamic", threshold=0.5))
    assert (dynamic.method, dynamic.lossless) == ("m2r2-carry:exit_thresholds=[0.5]", False)
    assert decoding(engine, Mode("dynamic", quality=1.0)).lossless
    with pytest.raises(UserError, match="no calibration"):
        decoding(engine, Mode("dynamic", quality=0.5))


def test_an_accelerator_without_a_dynamic_mode() -> None:
    engine = attach("tiny", "kangaroo")
    with pytest.raises(UserError, match=r"method kangaroo has no dynamic mode; accepted: .* m2r2"):
        decoding(engine, Mode("dynamic", threshold=0.5))
