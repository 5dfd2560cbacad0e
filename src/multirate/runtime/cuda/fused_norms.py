"""RMS norms as one kernel each, for passes whose time is the number of their kernels.

transformers writes an RMS norm as six operations, each a kernel of its own on a GPU: with two norms
a layer that is a quarter of a short pass's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PROBE_ROWS = 4


class FusedNorms:
    """The modules of `model` that compute what torch's own `rms_norm` does.

    epsilons: of these. Found by running both on random rows, whatever their classes are called; a
    norm of another kind (a LayerNorm, Gemma's with 1 + weight) stays as it is.
    """

    def __init__(self, model: nn.Module) -> None:
        self.epsilons = {
            module: epsilon
            for module in model.modules()
            if (epsilon := _rms_epsilon(module)) is not None
        }

    @contextmanager
    def active(self) -> Iterator[None]:
        """For the duration these modules run as one kernel each; their hooks run as ever."""
        replaced = [module for module in self.epsilons if "forward" not in vars(module)]
        for module in replaced:
            module.forward = partial(_rms_norm, module, self.epsilons[module])
        try:
            yield
        finally:
            for module in replaced:
                del module.forward


def _rms_norm(module: nn.Module, epsilon: float, x: Tensor) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return F.rms_norm(x, weight.shape, weight, epsilon)


@torch.no_grad()
def _rms_epsilon(module: nn.Module) -> float | None:
    """What is added to the mean square; None: it is no such norm."""
    parameters = dict(module.named_parameters())
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if list(parameters) != ["weight"] or not isinstance(epsilon, float):
        return None
    weight = parameters["weight"]
    if weight.dim() != 1 or not weight.is_floating_point() or weight.device.type == "meta":
        return None
    x = torch.randn(_PROBE_ROWS, len(weight), dtype=weight.dtype, device=weight.device)
    try:
        own = module(x)
    except (RuntimeError, TypeError):
        return None  # it takes other arguments
    if not isinstance(own, Tensor) or own.shape != x.shape or own.dtype != x.dtype:
        return None
    difference = (own.float() - _rms_norm(module, epsilon, x).float()).norm()
    limit = 1e-5 if weight.dtype in (torch.float32, torch.float64) else 1e-2
    return epsilon if difference <= limit * own.float().norm() else None
