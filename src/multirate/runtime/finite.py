"""Weights that are no numbers: whatever is decoded with them is nonsense."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from multirate.errors import UserError

_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@torch.no_grad()
def first_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor that holds NaN or infinity; None: there is none. A vector may
    hold -inf. Tensors of other kinds, or without memory, are not looked at.
    """
    for name, tensor in named:
        plain = type(tensor) in (nn.Parameter, Tensor) and not tensor.is_meta
        if not plain or tensor.dtype not in _SUMMED or tensor.sum().isfinite():
            continue
        # the sum alone may be beyond its dtype, and a bias may rule tokens out with -inf
        wrong = ~tensor.isfinite() if tensor.ndim > 1 else tensor.isnan() | tensor.isposinf()
        if wrong.any():
            return name
    return None


def check_weights(model: nn.Module) -> None:
    """UserError for a model with a weight that is not finite."""
    name = first_not_finite(model.named_parameters())
    if name is not None:
        raise UserError(
            f"the model's weight {name} holds values that are not finite: its files are damaged, "
            "or it was saved in a dtype too narrow for it; download or convert it again"
        )
