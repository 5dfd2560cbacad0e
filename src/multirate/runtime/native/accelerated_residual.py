"""The accelerated residual that predicts experts, on the native kernel
(methods/m2r2_experts/modules.py states both).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multirate.runtime.native import abi, library
from multirate.runtime.native.packing import Owner


class NativeAcceleratedResidual:
    """down [L, rank, 2d], pruned [L, E · s, d] or None, up[δ − 1] [L, d, rank + E · s] in the
    kernel's form (bf16): what it predicts may differ from what fp32 would, which changes no
    token.
    """

    def __init__(
        self,
        down: Tensor,
        up: Sequence[Tensor],
        pruned: Tensor | None = None,
        rows: int = 0,
        eps: float = 1e-6,
    ) -> None:
        self._library, self._owner = library.kernel(), Owner()
        self._workspace = library.Workspace()
        rank = down.shape[1]
        self._sites = [
            [
                self._owner.low_rank(down[layer].float(), one[layer, :, :rank].float(), silu=True)
                for one in up
            ]
            for layer in range(len(down))
        ]
        self.most_depth, self.eps = len(up), eps
        self.ones = self._owner.floats(
            torch.ones(up[0].shape[1], dtype=torch.float32, device="cpu")
        )
        self._pairs: list[list[abi.CData]] = []  # by layer, for the near depth with each far one
        if pruned is not None:
            for layer in range(len(down)):
                ups = [keep(self._owner, one[layer, :, rank:].T) for one in up]
                neurons = keep(self._owner, pruned[layer])
                self._pairs.append(
                    [
                        abi.new("PrunedPair", down=neurons, near=ups[0], far=far, rows=rows)
                        for far in ups
                    ]
                )

    def sites(self, depths: int) -> list[int]:
        """Addresses [L · depths] of the adapters, layer by layer."""
        return [abi.address(site) for sites in self._sites for site in sites[:depths]]

    def pairs(self, depths: int) -> list[int]:
        """Addresses [L · depths] of the pruned experts, the near depth with each; empty: there are
        none.
        """
        return [abi.address(one) for layer in self._pairs for one in layer[:depths]]

    def step(
        self,
        layer: int,
        residual: Tensor,
        state: Tensor | None,
        depths: int,
        routing: tuple[Tensor, Tensor] | None = None,
    ) -> list[Tensor]:
        """As ExpertPredictor.step: residual, state fp32 [N, d], routing int64 and fp32 [N, k] → p
        of each depth.
        """
        residual = residual.float().contiguous()
        found = [torch.empty_like(residual) for _ in self._sites[layer][:depths]]
        pairs, ids, weights, k = abi.NULL, abi.NULL, abi.NULL, 0
        if self._pairs:
            assert routing is not None
            pairs = abi.ffi.new("PrunedPair *[]", self._pairs[layer])
            ids, weights = abi.tensor(routing[0]), abi.tensor(routing[1])
            k = routing[0].shape[1]
        self._library.mr_predict_residual(
            self._workspace.address,
            abi.ffi.new("LowRank *[]", self._sites[layer]),
            pairs,
            self.most_depth,
            ids,
            weights,
            k,
            self.ones,
            self.eps,
            abi.tensor(residual),
            abi.tensor(state),
            len(residual),
            len(found),
            abi.ffi.new("float *[]", [abi.tensor(one) for one in found]),
        )
        return found


class NativeResidualWithAttention:
    """What a predictor with attention needs beside the decoder's own layers, in the kernel's form
    (bf16).

    pruned, gated [L, E · s, d], up [L, d, rank + E · s + E], down [L, rank, d] or None.
    """

    def __init__(
        self,
        down: Tensor | None,
        up: Tensor,
        pruned: Tensor,
        gated: Tensor,
        rows: int,
        depth: int,
        eps: float = 1e-6,
    ) -> None:
        self._library, self._owner = library.kernel(), Owner()
        self._workspace = library.Workspace()
        self.most_depth, self.eps = depth, eps
        self.ones = self._owner.floats(torch.ones(up.shape[1], dtype=torch.float32, device="cpu"))
        rank, neurons = 0 if down is None else down.shape[1], pruned.shape[1]
        layers, self._sites = [], []
        for layer in range(len(up)):
            site = None
            if down is not None:
                self._sites.append(
                    self._owner.low_rank(
                        down[layer].float(), up[layer, :, :rank].float(), silu=True
                    )
                )
                site = self._sites[-1]
            places = [
                pruned[layer],
                gated[layer],
                up[layer, :, rank : rank + neurons].T,
                up[layer, :, rank + neurons :].T,
            ]
            gate, other, out, means = (keep(self._owner, one) for one in places)
            layers.append(
                abi.new(
                    "PrunedExperts",
                    site=site,
                    gate=gate,
                    up=other,
                    down=out,
                    means=means,
                    rows=rows,
                )
            )
        self.layers = abi.array("PrunedExperts", layers)

    def leaving(self, layer: int, residual: Tensor, routing: tuple[Tensor, Tensor]) -> Tensor:
        """The stream after attention of `layer` [N, d] and its routing [N, k] → what is thought to
        leave it.
        """
        x = abi.copied(residual)
        ids, weights = routing[0].contiguous(), routing[1].float().contiguous()
        self._library.mr_pruned_experts(
            self._workspace.address,
            self.layers + layer,
            abi.tensor(ids),
            abi.tensor(weights),
            ids.shape[1],
            self.ones,
            self.eps,
            abi.tensor(x),
            *x.shape,
        )
        return x


def keep(owner: Owner, values: Tensor) -> abi.CData:
    """A bf16 copy that lives as long as `owner`."""
    return owner.address(owner.slabs.copy(values.detach().bfloat16().contiguous()))
