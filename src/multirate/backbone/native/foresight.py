"""The accelerated residual that names experts, on the native kernel (methods/m2r2_experts/modules.py states it)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from multirate.backbone.native import library
from multirate.backbone.native.packing import Owner


class NativeForesight:
    """down [L, rank, 2d], up[δ − 1] [L, d, rank] in the kernel's form (bf16): what is named may differ from what fp32
    would name, which changes no token."""

    def __init__(self, down: Tensor, up: Sequence[Tensor], eps: float = 1e-6) -> None:
        self._library, self._owner, self._eps = library.kernel(), Owner(), eps
        self._sites = [
            [self._owner.low_rank(down[layer].float(), one[layer].float(), silu=True) for one in up]
            for layer in range(len(down))
        ]
        self._addresses = [[ctypes.addressof(site) for site in sites] for sites in self._sites]
        self._ones = torch.ones(up[0].shape[1])

    def step(self, layer: int, residual: Tensor, state: Tensor | None, depths: int) -> list[Tensor]:
        """As ExpertForecast.step: residual, state fp32 [N, d] → p of depths 1 … depths."""
        residual = residual.float().contiguous()
        sites = self._addresses[layer][:depths]
        found = [torch.empty_like(residual) for _ in sites]
        before = None if state is None else state.data_ptr()
        # two depths a call: they share the product with `down`
        for i in range(1, max(len(sites), 2), 1):
            far = (sites[i], found[i].data_ptr()) if i < len(sites) else (None, None)
            self._library.mr_foresee(
                sites[0], far[0], self._ones.data_ptr(), self._eps, residual.data_ptr(), before, len(residual),
                found[0].data_ptr(), far[1],
            )
        return found
