"""When a training's numbers stop being finite: nothing good comes of them, so it ends there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from multirate.errors import Diverged


def not_finite(values: Any, name: str = "") -> str | None:
    """The name of the first tensor or number with NaN or infinity in nested mappings and sequences;
    None: all are finite.
    """
    if isinstance(values, Tensor):
        kind = values.is_floating_point()
        return name if kind and not bool(torch.isfinite(values).all()) else None
    if isinstance(values, float):
        return None if math.isfinite(values) else name
    parts: Any = ()
    if isinstance(values, Mapping):
        parts = values.items()
    elif isinstance(values, Sequence) and not isinstance(values, str):
        parts = enumerate(values)
    found = (not_finite(value, f"{name}.{key}" if name else str(key)) for key, value in parts)
    return next((one for one in found if one is not None), None)


def check_step(step: int, loss: float, norm: float, rate: float) -> None:
    """Raises Diverged unless the loss and the norm of the gradient of a step (counted from 0) are
    finite. rate: the peak learning rate.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
    if step == 0:
        raise Diverged(
            f"{what} in the first step, before any weight was changed: the base model's outputs "
            "or the initial weights are not finite"
        )
    raise Diverged(f"training diverged: {what} in step {step + 1}; {_advice(rate)}")


def check_weights(module: nn.Module, step: int, rate: float) -> None:
    """Raises Diverged for weights that are not worth keeping, after `step` steps."""
    name = not_finite(module.state_dict())
    if name is not None:
        raise Diverged(
            f"training diverged: '{name}' is not finite after step {step}; {_advice(rate)}"
        )


def check_results(results: Mapping[str, Any], step: int, rate: float) -> None:
    """Raises Diverged where finite weights give losses on held-out samples that are not finite."""
    for term in results.get("terms", ()):
        if not_finite(term["kl"]) is not None:
            raise Diverged(
                f"training diverged: the held-out loss is {term['kl']} after step {step}; "
                f"{_advice(rate)}"
            )


def _advice(rate: float) -> str:
    return f"lower the learning rate (lr is {rate:g}) or raise warmup_steps"
