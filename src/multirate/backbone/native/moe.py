"""A mixture of experts on the native kernel, its experts handed over by a provider.

The kernel runs a layer's attention; then the router chooses, the provider hands over each needed expert's packed
weights in whatever order they are there, and the sum over a row's experts is formed in the router's order. As in
NativeDecoder, a row's bits depend neither on the other rows of a call nor on where experts came from.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from multirate.backbone.decoder import Decoder, LayerAdapter
from multirate.backbone.kv_cache import KVCache
from multirate.backbone.native import library
from multirate.backbone.native.decoder import NativeDecoder
from multirate.backbone.native.packing import Owner, interleave_gate_up, padded
from multirate.backbone.rows import Rows

MOE_FAMILIES = ("mixtral", "qwen3_moe")


class ExpertProvider(Protocol):
    """Has the experts of a model."""

    def run(
        self, row: int, needed: list[int], compute: Callable[[int, Mapping[str, Tensor]], None], residual: Tensor
    ) -> None:
        """Calls compute(expert, weights) once for every needed expert of the row-th mixture layer, in any order.

        weights: "gate_up_proj" and "down_proj" as `pack_expert` makes them, unchanged until compute returns. residual
        [N, d]: the stream after this layer's attention.
        """
        ...


def pack_expert(gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """gate_up [2I, H], down [H, I] → the same numbers (bf16) as the kernel reads them (packing.Owner.linear)."""
    gate, up = gate_up.chunk(2)
    return {"gate_up_proj": _packed(interleave_gate_up(gate, up)), "down_proj": _packed(down)}


def unpack_expert(gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """The inverse of `pack_expert`."""
    rows = _unpacked(gate_up).unflatten(0, (-1, 2, 32)).transpose(0, 1)
    return {"gate_up_proj": rows.flatten(0, 2), "down_proj": _unpacked(down)}


def _packed(weight: Tensor) -> Tensor:
    outputs, inputs = weight.shape
    return weight.reshape(-1, 4, 16, inputs // 2, 2).permute(0, 3, 1, 2, 4).reshape(outputs, inputs)


def _unpacked(weight: Tensor) -> Tensor:
    outputs, inputs = weight.shape
    return weight.reshape(-1, inputs // 2, 4, 16, 2).permute(0, 2, 3, 1, 4).reshape(outputs, inputs)


def expert_tiles(hidden: int, intermediate: int) -> bool:
    """Whether experts of this size can be packed."""
    return hidden % 64 == 0 and intermediate % 32 == 0


class _Expert(ctypes.Structure):
    _fields_ = [("gate_up", library.Linear), ("down", library.Linear)]


class NativeMoEDecoder(NativeDecoder):
    """A NativeDecoder whose mixture layers get their experts from `provider`. Not for batches of drafts in one call."""

    alone = False

    @staticmethod
    def supports(model: nn.Module) -> str | None:
        config: Any = getattr(model, "config", None)
        kind = getattr(config, "model_type", "unknown")
        if kind not in MOE_FAMILIES:
            return f"the native kernel knows mixtures of {', '.join(MOE_FAMILIES)}, not {kind}"
        reason = NativeDecoder.cannot_run(config, model)
        if reason is None and library.kernel().mr_fixed_point():
            return "on this processor the kernel multiplies fixed-point weights, experts are packed as bfloat16"
        return reason

    def __init__(self, model: nn.Module, provider: Callable[[], ExpertProvider]) -> None:
        self._provider = provider
        self._experts: dict[int, _Expert] = {}
        super().__init__(model)
        moe = [layer.moe for layer in self._layers]
        self._row_of = {i: row for row, i in enumerate(i for i, block in enumerate(moe) if block is not None)}
        first: Any = next(block for block in moe if block is not None)
        self._num_experts, self._top_k = first.num_experts, first.top_k
        config: Any = model.config
        self._normalise = int(getattr(config, "norm_topk_prob", True))
        self._routers = {i: self._owner.linear(moe[i].router.weight) for i in self._row_of}
        self._norms = {
            i: self._owner.floats(self._layers[i].module.post_attention_layernorm.weight) for i in self._row_of
        }

    def pack(self, index: int, owner: Owner, deltas: Mapping[str, Tensor] | None = None) -> library.Layer:
        if self._layers[index].moe is None:
            return super().pack(index, owner, deltas)
        return self.pack_attention(index, owner, deltas)

    def layers(
        self, x: Tensor, rows: Rows, start: int, stop: int, cache: Any,
        adapters: Mapping[int, LayerAdapter] | None = None,
    ) -> Tensor:
        if start >= stop:
            return x
        x = x.float().clone(memory_format=torch.contiguous_format)
        packed = self.packed_adapters(adapters)
        begin = start
        for i in range(start, stop):
            if i in self._row_of:
                self._run(x, rows, begin, i + 1, cache, packed)
                begin = i + 1
                self._mixture(i, x, rows, None if adapters is None else adapters.get(i))
        if begin < stop:
            self._run(x, rows, begin, stop, cache, packed)
        return x

    def greedy(
        self, rows: Rows, cache: KVCache, ids: Sequence[int] | None = None, x: Tensor | None = None, start: int = 0
    ) -> tuple[Tensor, list[int]]:
        return Decoder.greedy(self, rows, cache, ids, x, start)

    def select(self, row: int, residual: Tensor) -> np.ndarray:
        """The experts [N, k] that the row-th mixture layer would choose for the stream residual [N, d]."""
        layer = next(i for i, r in self._row_of.items() if r == row)
        return self._route(layer, residual.float().contiguous())[1]

    def _route(self, layer: int, x: Tensor) -> tuple[Tensor, np.ndarray, np.ndarray]:
        n, router = len(x), self._routers[layer]
        normed = torch.empty(n, self.facts.hidden_size)
        logits = torch.empty(n, padded(self._num_experts))
        ids, weights = np.empty((n, self._top_k), np.int64), np.empty((n, self._top_k), np.float32)
        self._library.mr_route(
            ctypes.addressof(router), self._norms[layer], self.eps, x.data_ptr(), n, self._num_experts, self._top_k,
            self._normalise, normed.data_ptr(), logits.data_ptr(), ids.ctypes.data, weights.ctypes.data,
        )
        return normed, ids, weights

    def _mixture(self, layer: int, x: Tensor, rows: Rows, adapter: LayerAdapter | None) -> None:
        normed, ids, weights = self._route(layer, x)
        n, k = ids.shape
        parts = torch.empty(n * k, x.shape[1])
        flat = ids.reshape(-1)

        def compute(expert: int, record: Mapping[str, Tensor]) -> None:
            places = np.flatnonzero(flat == expert).astype(np.int32)
            wanted = places // np.int32(k)
            self._library.mr_expert(
                ctypes.addressof(self._expert(record)), normed.data_ptr(), wanted.ctypes.data, places.ctypes.data,
                len(places), parts.data_ptr(),
            )

        self._provider().run(self._row_of[layer], np.unique(flat).tolist(), compute, x)
        self._library.mr_combine(parts.data_ptr(), weights.ctypes.data, n, k, x.shape[1], x.data_ptr())
        if adapter is not None and rows.accelerated is not None:
            self._beside(adapter, normed, x, np.flatnonzero(rows.accelerated))

    def _beside(self, adapter: LayerAdapter, normed: Tensor, x: Tensor, fast: np.ndarray) -> None:
        module = adapter.deltas().get("mlp")
        if module is None or not len(fast):
            return
        index = torch.from_numpy(fast)
        dtype = next(module.parameters()).dtype
        x[index] += module(normed[index].to(dtype)).float()

    def _expert(self, record: Mapping[str, Tensor]) -> _Expert:
        """The kernel's view of a record, made once for each place in memory that records are read into."""
        gate_up, down = record["gate_up_proj"], record["down_proj"]
        found = self._experts.get(gate_up.data_ptr())
        if found is None or found.down.weight != down.data_ptr():
            found = _Expert(
                library.Linear(gate_up.data_ptr(), None, None, gate_up.shape[1], gate_up.shape[0]),
                library.Linear(down.data_ptr(), None, None, down.shape[1], down.shape[0]),
            )
            self._experts[gate_up.data_ptr()] = found
        return found
