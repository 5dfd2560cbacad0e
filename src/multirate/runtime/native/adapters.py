"""A layer's low-rank adapters in the kernel's form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from multirate.errors import UserError
from multirate.runtime.native import abi
from multirate.runtime.native.packing import Owner, interleave_gate_up, padded

KERNEL_RANK = abi.constant("MAX_RANK")  # widest low-rank site the kernel's scratch holds


class AdapterPack:
    """Packed copies of `adapters` (layer index → LayerAdapter) for a model of `num_layers` layers.

    rotary_halves: what the decoder does to all that makes queries. A site must be a module with
    `down` and `up` linears: f(x) = up(down(x)). Raises UserError for another form.
    """

    def __init__(
        self,
        adapters: Mapping[int, Any],
        num_layers: int,
        rotary_halves: Callable[[Tensor], Tensor],
    ) -> None:
        self._owner, self._rotary_halves = Owner(), rotary_halves
        self._structures: dict[int, abi.CData] = {}
        addresses: list[int | None] = [None] * num_layers
        for i, adapter in adapters.items():
            structure = self._structures[i] = self._pack(dict(adapter.deltas()))
            addresses[i] = abi.address(structure)
        self.address = abi.pointers("Adapter", addresses)

    def _pack(self, sites: dict[str, Any]) -> abi.CData:
        def halves(site: str) -> tuple[Tensor | None, Tensor | None]:
            module = sites.get(site)
            if module is None:
                return None, None
            if not (hasattr(module, "down") and hasattr(module, "up")):
                raise UserError(
                    f"adapter site '{site}' is not a low-rank down/up pair; use backend='hf'"
                )
            a, b = module.down.weight.detach(), module.up.weight.detach()
            if padded(a.shape[0]) > KERNEL_RANK // 2:
                most = KERNEL_RANK // 2
                raise UserError(
                    f"adapter site '{site}' has rank {a.shape[0]}; the kernel's maximum is {most}"
                )
            return a, self._rotary_halves(b) if site == "q" else b

        packed = {site: self._owner.low_rank(*halves(site)) for site in ("q", "o", "down", "mlp")}
        (gate_a, gate_b), (up_a, up_b) = halves("gate"), halves("up")
        if (gate_a is None) != (up_a is None):
            raise UserError("adapters of 'gate' and 'up' must come together")
        if gate_a is not None and gate_b is not None and up_a is not None and up_b is not None:
            # One site for both: A stacks the two, B is block-diagonal with rows in the packed
            # gate/up order.
            wide_gate = torch.cat(
                [
                    gate_b,
                    torch.zeros(
                        gate_b.shape[0], up_a.shape[0], dtype=gate_b.dtype, device=gate_b.device
                    ),
                ],
                dim=1,
            )
            wide_up = torch.cat(
                [
                    torch.zeros(
                        up_b.shape[0], gate_a.shape[0], dtype=up_b.dtype, device=up_b.device
                    ),
                    up_b,
                ],
                dim=1,
            )
            both = interleave_gate_up(wide_gate, wide_up)
            packed["gate_up"] = self._owner.low_rank(torch.cat([gate_a, up_a]), both)
        return abi.new("Adapter", **packed)
