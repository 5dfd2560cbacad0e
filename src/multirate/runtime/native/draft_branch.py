"""Draft branches and what else drafts, packed for the kernel (runtime/draft_branch.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from multirate.runtime.decoder import LayerAdapter
from multirate.runtime.draft_branch import (
    BranchHead,
    BranchLayer,
    DraftBranch,
    Drafting,
    DraftWeights,
    Features,
    Likeliest,
    PackedBranch,
    PackedLinear,
)
from multirate.runtime.draft_branch import Linear as LinearMap
from multirate.runtime.fused import DraftShape, FusedSequences, Lookups
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.native import abi, library
from multirate.runtime.native.adapters import AdapterPack
from multirate.runtime.native.cache import NativeKVCache
from multirate.runtime.native.draft_head import DraftHead
from multirate.runtime.native.formats import draft_format, mixing_format
from multirate.runtime.native.fused_sequences import NativeFusedSequences
from multirate.runtime.native.own_layer import OwnLayer, tiles
from multirate.runtime.native.packing import Owner
from multirate.runtime.noise import Noise
from multirate.runtime.rows import Rows

if TYPE_CHECKING:
    from multirate.runtime.native.decoder import NativeDecoder


class NativeDrafting(Drafting):
    """What drafts beside `decoder`. weights: how it is packed."""

    def __init__(self, decoder: NativeDecoder, weights: DraftWeights) -> None:
        self._decoder, self._weights = decoder, weights
        self._owner = Owner(draft_format(weights))

    def linear(self, weight: Tensor) -> PackedLinear:
        return NativeLinear(self._decoder, self._owner, weight)

    def head(self, head: BranchHead) -> DraftHead:
        return DraftHead(self._decoder, self._owner, head)

    def layer(self, layer: BranchLayer) -> OwnLayer | None:
        return OwnLayer(self._decoder, self._owner, layer) if tiles(self._decoder, layer) else None

    def branch(self, branch: DraftBranch) -> PackedBranch | None:
        layer, head = branch.layer, branch.head
        if layer is not None and not tiles(self._decoder, layer):
            return None
        if head.norm is not None and branch.eps != self._decoder.eps:
            return None  # the kernel's heads have the model's epsilon
        return NativeBranch(self._decoder, branch, self._weights)


class NativeLinear(PackedLinear):
    """One product of the kernel."""

    def __init__(self, decoder: NativeDecoder, owner: Owner, weight: Tensor) -> None:
        self._decoder, self._owner, self._linear = decoder, owner, owner.linear(weight)

    def __call__(self, x: Tensor) -> Tensor:
        return self._decoder.product(self._linear, x, None)


class NativeBranch(PackedBranch):
    """A draft branch that the kernel runs: embedding, carry, both rows' first layers and the own
    layer in one call. Residuals are fp32.
    """

    def __init__(self, decoder: NativeDecoder, branch: DraftBranch, weights: DraftWeights) -> None:
        self._decoder, self._branch = decoder, branch
        self._library = library.kernel()
        self._owner = owner = Owner(draft_format(weights))
        self._mixing = Owner(mixing_format(weights))
        self._head = DraftHead(decoder, owner, branch.head)
        self._features = None
        if branch.features is not None:
            self._features = PackedFeatures(decoder, branch.features)
        self._adapters = None
        if branch.adapters:
            self._adapters = AdapterPack(
                branch.adapters, decoder.info.num_layers, decoder.rotary_halves
            )
        self._packed = decoder.branch(
            adapters=None if self._adapters is None else self._adapters.address,
            **self._linear("carry", branch.carry),
            **self._linear("fuse_branch", branch.fuse_branch),
            **self._linear("fuse_carried", branch.fuse_carried),
            **({} if self._features is None else self._features.fields()),
            norm_in=owner.floats(branch.norm_in),
            norm_out=owner.floats(branch.norm_out),
            carry_eps=branch.eps,
            exit_layer=branch.exit_layer,
        )
        # without layers of the model below, verification embeds the tokens anyway
        self.keys_only = branch.exit_layer == 0
        if (deltas := _mergeable(branch.adapters, branch.exit_layer)) is not None:
            self._merged = decoder.pack(0, owner, deltas)
            self._packed.merged = self._merged
            self.keys_only = True
        self._layer = None
        if branch.layer is not None:
            self._layer = OwnLayer(decoder, owner, branch.layer)
            self._packed.block_shape = self._layer.shape
            self._packed.block = self._layer.packed

    def _linear(self, name: str, linear: LinearMap | None) -> dict[str, Any]:
        """The fields of a Branch for one of its products."""
        if linear is None:
            return {}
        return {
            name: self._mixing.linear(linear.weight, linear.bias),
            f"{name}_norm": self._owner.floats(linear.norm),
        }

    @property
    def window(self) -> int | None:
        return None if self._layer is None else self._layer.window

    @window.setter
    def window(self, tokens: int | None) -> None:
        if self._layer is not None:
            self._layer.window = tokens

    @property
    def own_cache(self) -> NativeKVCache | None:
        return self._own

    def begin(self, cache: KVCache) -> None:
        assert isinstance(cache, NativeKVCache)
        self._cache, self._own = cache, self._own_cache_for(cache)

    def _own_cache_for(self, cache: NativeKVCache) -> NativeKVCache | None:
        """An empty cache for the own layer, as large as `cache`; None without one."""
        layer = self._layer
        return None if layer is None else layer.new_cache(cache.batch, cache.capacity)

    def carried(self, hidden: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        return hidden if self._features is None else self._features.carried(hidden, taps)

    def step(
        self, ids: list[int], rows: Rows, carried: Tensor | None, fresh: int
    ) -> tuple[Tensor, Tensor]:
        n, cache, own = len(ids), self._cache, self._own
        for store in (cache, own):
            if store is not None:
                store.make_room(rows)
        tokens = np.array(ids, dtype=np.int64)
        x = abi.floats_for(n + fresh, self._decoder.info.hidden_size)
        carried = None if carried is None else carried.float().contiguous()
        self._library.mr_branch_step(
            self._decoder.workspace.address,
            self._packed,
            cache.address,
            abi.NULL if own is None else own.address,
            0 if own is None else own.capacity,
            abi.rows_of(rows, cache.capacity),
            fresh,
            abi.longs(tokens),
            abi.tensor(carried),
            abi.tensor(x),
        )
        return x[:fresh], x[fresh:]

    def top(
        self, p: Tensor, count: int, sharpness: float, noise: Sequence[Noise] | None
    ) -> Likeliest:
        return self._head.top(p, count, sharpness, noise)

    @cached_property
    def _scorer(self) -> abi.CData:
        """`DraftBranch.agreement` for the kernel."""
        agreement = self._branch.agreement
        assert agreement is not None
        return abi.new(
            "Scorer",
            weight=self._owner.floats(agreement.weight * self._decoder.norm_weight),
            bias=self._owner.floats(agreement.bias),
            out=self._owner.floats(agreement.out),
            out_bias=agreement.out_bias,
            latent=len(agreement.bias),
        )

    def agreement(self, p: Tensor) -> list[float]:
        rows, scores = p.float().contiguous(), np.empty(len(p))
        self._library.mr_scores(
            self._scorer,
            self._decoder.eps,
            self._decoder.info.hidden_size,
            abi.tensor(rows),
            len(rows),
            abi.doubles(scores),
        )
        found: list[float] = scores.tolist()
        return found

    def fused(self, shape: DraftShape, lookups: Lookups) -> FusedSequences:
        rule = None
        if (unverified := shape.unverified) is not None:
            rule = abi.new(
                "Unverified",
                least=unverified.threshold,
                scorer=self._scorer if unverified.by_agreement else None,
                nodes=unverified.nodes,
            )
        return NativeFusedSequences(
            self._decoder,
            self._packed,
            self._head,
            self._layer,
            shape,
            lookups,
            own_cache=lambda: self._own,
            rule=rule,
        )


class PackedFeatures:
    """`Features` as one product, once a step."""

    def __init__(self, decoder: NativeDecoder, features: Features) -> None:
        # residuals of single channels are far above the others: 16 bits, whatever drafts have
        self._owner = Owner()
        self._weight = self._owner.linear(features.weight)
        self._decoder, self._taps, self._added = decoder, features.taps, features.added

    def fields(self) -> dict[str, Any]:
        """Those of a Branch."""
        return {
            "taps": list(self._taps),
            "tap_count": len(self._taps),
            "features": self._weight,
            "features_added": self._added,
        }

    def carried(self, hidden: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        """float32 [n, d] of tokens' h_L [n, d] and what enters each tap [n, d]."""
        x = torch.cat([taps[layer] for layer in self._taps], dim=-1).float().contiguous()
        into = abi.copied(hidden) if self._added else None
        return self._decoder.product(self._weight, x, None, into)


def _mergeable(
    adapters: Mapping[int, LayerAdapter] | None, exit_layer: int
) -> dict[str, Tensor] | None:
    """What the adapters add to layer 0's weights, if they do nothing else and no target row runs
    while drafting. A draft then reads one set of weights, and verification needs only the keys and
    values of its target rows.
    """
    if exit_layer != 1 or not adapters:
        return None
    sites: dict[str, Any] = dict(adapters[0].deltas())
    if not sites.keys() <= {"q", "o", "gate", "up", "down"} or not all(
        hasattr(s, "up") for s in sites.values()
    ):
        return None
    return {
        name: site.up.weight.detach().float() @ site.down.weight.detach().float()
        for name, site in sites.items()
    }
