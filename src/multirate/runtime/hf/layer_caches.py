"""Small objects that a transformers attention module takes as its cache (`update(key, value,
layer_idx)`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class RecordingKV:
    """Keeps each layer's keys and values [B, H_kv, T, D] and attends to exactly those.

    Unlike transformers' own caches it never drops what a sliding window has passed.
    """

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys[layer_idx], self.values[layer_idx] = key, value
        return key, value


class SharedKV:
    """Serves given keys and values of the slow residual, and ignores the ones the calling rows
    offer.

    An accelerated residual run through layer i with it attends to the slow residual's K/V and
    writes nothing (docs/methods/m2r2.md, point 2). `keys[i]`, `values[i]`: [B, H_kv, S, D] for each
    layer i that will be run.
    """

    def __init__(
        self,
        keys: Mapping[int, Tensor] | Sequence[Tensor],
        values: Mapping[int, Tensor] | Sequence[Tensor],
    ) -> None:
        self.keys = keys
        self.values = values

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self.keys[layer_idx], self.values[layer_idx]


class SharedThenOwnKV(SharedKV):
    """Serves the given keys and values, followed by the ones the calling rows offer: [B, H_kv, S +
    T, D].
    """

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        return torch.cat([keys, key.to(keys.dtype)], dim=-2), torch.cat(
            [values, value.to(values.dtype)], dim=-2
        )
