"""A mixture of experts on the native kernel, its experts handed over by a provider.

The kernel runs a layer's attention; then the router chooses, the provider hands over each needed
expert's packed weights in whatever order they are there, and the sum over a row's experts is formed
in the router's order. As in NativeDecoder, a row's bits depend neither on the other rows of a call
nor on where experts came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from multirate.errors import UserError
from multirate.runtime.decoder import LayerAdapter
from multirate.runtime.native import abi
from multirate.runtime.native.decoder import NativeDecoder
from multirate.runtime.native.families import MIXTURES
from multirate.runtime.native.packing import Owner, padded
from multirate.runtime.native.supported import cannot_run
from multirate.runtime.quantised import weight_of
from multirate.runtime.rows import Rows

MOE_FAMILIES = tuple(MIXTURES)


ComputeExperts = Callable[[Sequence[tuple[int, int]]], None]
"""Computes with some of the experts that were asked for: (expert, the slot that it is in) of each.
"""


KernelCall = tuple[Any, ...]
"""mr_mixture's arguments from the caches to the residual."""
KernelPasses = Callable[[KernelCall, int, int, int, int, int], None]
"""(call, start, stop, where it is routed, row of the first mixture layer, rows of the call): runs
layers [start, stop), loading what they need. Raises UserError when a read failed.
"""


class ExpertProvider(Protocol):
    """Has the experts of a model."""

    def kernel(self, decoder: NativeMoEDecoder) -> KernelPasses | None:
        """Runs whole passes of `decoder`; None: `run` is to be asked layer by layer."""
        ...

    def run(
        self,
        row: int,
        needed: list[int],
        compute: ComputeExperts,
        residual: Tensor,
        routing: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Hands every needed expert of the row-th mixture layer to `compute` once, in any order and
        grouping.

        A slot is unchanged until compute returns. residual [N, d]: the stream after this layer's
        attention; routing: experts int64 [N, k] and their weights fp32 [N, k].
        """
        ...

    def expert(self, row: int, slot: int) -> abi.CData:
        """The kernel's view of what a slot holds, an expert of this row."""
        ...


def expert_tiles(hidden: int, intermediate: int) -> bool:
    """Whether experts of this size can be packed."""
    return hidden % 64 == 0 and intermediate % 32 == 0


class NativeMoEDecoder(NativeDecoder):
    """A NativeDecoder whose mixture layers get their experts from `provider`. Not for batches of
    drafts in one call.
    """

    runs_the_model = True
    families = MIXTURES
    probes = False  # its experts may be on disk
    supports_fused = False

    @staticmethod
    def supports(model: nn.Module) -> str | None:
        config: Any = getattr(model, "config", None)
        kind = getattr(config, "model_type", "unknown")
        if kind not in MOE_FAMILIES:
            return f"the native kernel supports mixtures of {', '.join(MOE_FAMILIES)}, not {kind}"
        if config.hidden_act != "silu":
            return f"the native kernel's experts use silu, not {config.hidden_act}"
        return cannot_run(config, model, MIXTURES[kind])

    def __init__(self, model: nn.Module, provider: Callable[[], ExpertProvider]) -> None:
        self._provider = provider
        super().__init__(model)
        moe = [layer.moe for layer in self._layers]
        self.row_of = {
            i: row for row, i in enumerate(i for i, block in enumerate(moe) if block is not None)
        }
        first: Any = next(block for block in moe if block is not None)
        self.num_experts, self.top_k = first.num_experts, first.top_k
        if not 1 <= self.top_k <= self.num_experts:
            raise UserError(
                f"{type(model).__name__} routes a token to {self.top_k} of {self.num_experts} "
                f"experts; accepted: 1 to {self.num_experts}"
            )
        config: Any = model.config
        linears = [self._owner.linear(weight_of(moe[i].router)) for i in self.row_of]
        norms = [self._layers[i].module.post_attention_layernorm.weight for i in self.row_of]
        self._pointers = (  # the kernel reads them by address
            abi.ffi.new("Linear *[]", linears),
            abi.ffi.new("float *[]", [self._owner.floats(norm) for norm in norms]),
            linears,
        )
        self.routers = abi.new(
            "Routers",
            routers=self._pointers[0],
            norms=self._pointers[1],
            eps=self.eps,
            experts=self.num_experts,
            top_k=self.top_k,
            normalise=int(getattr(config, "norm_topk_prob", True)),
            hidden=self.info.hidden_size,
        )
        self._kept: _Routing | None = None
        self.running: tuple[Rows, Any] | None = (
            None  # rows and cache of a pass that Python leads layer by layer
        )
        self._asked: _Routing | None = (
            None  # of `select`, which is called between a layer's routing and its sum
        )

    def pack(
        self, index: int, owner: Owner, deltas: Mapping[str, Tensor] | None = None
    ) -> abi.CData:
        if self._layers[index].moe is None:
            return super().pack(index, owner, deltas)
        return self.pack_attention(index, owner, deltas)

    def _run(
        self,
        x: Tensor,
        rows: Rows,
        start: int,
        stop: int,
        cache: Any,
        adapters: Mapping[int, LayerAdapter] | None = None,
    ) -> None:
        kernel = self._provider().kernel(self)
        if kernel is not None:
            self._passes(kernel, x, rows, start, stop, cache, adapters)
            return
        begin, self.running = start, (rows, cache)
        try:
            for i in range(start, stop):
                if i in self.row_of:
                    super()._run(x, rows, begin, i + 1, cache, adapters)
                    begin = i + 1
                    self._mixture(i, x, rows, None if adapters is None else adapters.get(i))
        finally:
            self.running = None
        if begin < stop:
            super()._run(x, rows, begin, stop, cache, adapters)

    def run_ahead(self, x: Tensor, start: int, stop: int) -> None:
        """Layers [start, stop) for x, a guess of what will enter them [N, d] fp32, in place,
        without the experts of mixture layers. x has the rows of the pass that is running: it
        attends to what that has cached, and leaves keys and values where the pass itself will
        overwrite them.
        """
        assert self.running is not None
        super()._run(x, self.running[0], start, stop, self.running[1])

    def route(self, row: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the row-th mixture layer's router says of the stream x [N, d] fp32: experts int64
        and weights fp32 [N, k], overwritten by the next call.
        """
        if self._asked is None or self._asked.rows != len(x):
            self._asked = self._new_routing(len(x))
        return self._route(row, x, self._asked).chosen

    def _passes(
        self,
        kernel: KernelPasses,
        x: Tensor,
        rows: Rows,
        start: int,
        stop: int,
        cache: Any,
        adapters: Mapping[int, LayerAdapter] | None,
    ) -> None:
        """Layers [start, stop) by the kernel, in one call but for adapters beside experts."""
        routing, fast, begin = self._routing(len(x)), rows.accelerated, start
        beside = {
            i: a for i, a in (adapters or {}).items() if i in self.row_of and "mlp" in a.deltas()
        }
        packed = self.packed_adapters(adapters)
        cache.make_room(rows)
        for i in range(start, stop):
            if i + 1 < stop and (fast is None or i not in beside):
                continue
            row = next((self.row_of[j] for j in range(begin, i + 1) if j in self.row_of), 1 << 30)
            call = (
                cache.address,
                packed or abi.NULL,
                abi.rows_of(rows, cache.capacity),
                abi.tensor(x),
            )
            kernel(call, begin, i + 1, routing.for_kernel, row, len(x))
            if fast is not None and i in beside:
                self._beside(beside[i], routing.normed, x, np.flatnonzero(fast))
            begin = i + 1

    def select(self, row: int, residual: Tensor) -> np.ndarray:
        """The experts [N, k] that the row-th mixture layer would choose for the stream residual [N,
        d], the likeliest first; overwritten by the next call.
        """
        return self.route(row, residual.float().contiguous())[0].numpy()

    def _new_routing(self, rows: int) -> _Routing:
        return _Routing(rows, self.top_k, self.num_experts, self.info.hidden_size)

    def _routing(self, rows: int) -> _Routing:
        """Memory for a call of so many rows, kept for the next: layers run one after the other."""
        if self._kept is None or self._kept.rows != rows:
            self._kept = self._new_routing(rows)
        return self._kept

    def _route(self, row: int, x: Tensor, into: _Routing) -> _Routing:
        self._library.mr_route(
            self._work, self.routers, row, abi.tensor(x), into.rows, into.for_kernel
        )
        return into

    def _mixture(self, layer: int, x: Tensor, rows: Rows, adapter: LayerAdapter | None) -> None:
        row, provider = self.row_of[layer], self._provider()
        routing = self._route(row, x, self._routing(len(x)))
        uses, into = _Uses(routing.ids), routing.for_kernel

        def compute(found: Sequence[tuple[int, int]]) -> None:
            counts, wanted, places = uses.of([expert for expert, _ in found])
            records = abi.ffi.new("Expert *[]", [provider.expert(row, slot) for _, slot in found])
            self._library.mr_experts(
                self._work,
                records,
                abi.ints(counts),
                len(found),
                into.normed,
                abi.ints(wanted),
                abi.ints(places),
                into.parts,
            )

        provider.run(row, uses.experts, compute, x, routing.chosen)
        self._library.mr_combine(
            into.parts, into.weights, *routing.ids.shape, x.shape[1], abi.tensor(x)
        )
        if adapter is not None and rows.accelerated is not None:
            self._beside(adapter, routing.normed, x, np.flatnonzero(rows.accelerated))

    def _beside(self, adapter: LayerAdapter, normed: Tensor, x: Tensor, fast: np.ndarray) -> None:
        module = adapter.deltas().get("mlp")
        if module is None or not len(fast):
            return
        index = torch.from_numpy(fast)
        dtype = next(module.parameters()).dtype
        x[index] += module(normed[index].to(dtype)).float()


class KernelMixture:
    """A decoder's layers and routers, as experts.h has them, and the experts of each row's slots.
    Outlived by the decoder.
    """

    def __init__(self, decoder: NativeMoEDecoder, experts: abi.CData) -> None:
        rows = [decoder.row_of.get(i, -1) for i in range(decoder.info.num_layers)]
        self._row_of, self._experts = np.array(rows, np.int32), experts
        self.packed = abi.new(
            "Mixture",
            shape=decoder.shape,
            layers=decoder.packed_layers,
            routers=decoder.routers,
            row_of=abi.ints(self._row_of),
            experts=experts,
        )


class _Routing:
    """What a layer's router says of `rows` rows, and where its experts' products go."""

    def __init__(self, rows: int, top_k: int, experts: int, hidden: int) -> None:
        self.rows = rows
        self.normed = abi.floats_for(rows, hidden)
        self._logits = abi.floats_for(rows, padded(experts))
        self.ids = np.empty((rows, top_k), np.int64)
        self.weights = np.empty((rows, top_k), np.float32)
        self.parts = abi.floats_for(rows * top_k, hidden)
        self.chosen = torch.from_numpy(self.ids), torch.from_numpy(self.weights)
        self.for_kernel = abi.new(
            "RoutedRows",
            normed=abi.tensor(self.normed),
            logits=abi.tensor(self._logits),
            ids=abi.longs(self.ids),
            weights=abi.floats(self.weights),
            parts=abi.tensor(self.parts),
        )


class _Uses:
    """Which rows each expert is for. ids [N, k] → `experts`, ascending, and for some of them their
    rows and places (row · k + rank) as the kernel takes them.
    """

    def __init__(self, ids: np.ndarray) -> None:
        n, self._k = ids.shape
        flat = ids.reshape(-1)
        if n == 1:
            self._order = np.argsort(flat).astype(np.int32)
            self.experts: list[int] = flat[self._order].tolist()
            self._starts = list(range(len(self.experts) + 1))
        else:
            self._order = np.argsort(flat, kind="stable").astype(np.int32)
            experts, starts = np.unique(flat[self._order], return_index=True)
            self.experts = experts.tolist()
            self._starts = [*starts.tolist(), len(flat)]
        self._index = {expert: i for i, expert in enumerate(self.experts)}

    def of(self, experts: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """→ counts [E], and rows and places [Σ counts] int32, expert by expert."""
        at = [self._index[expert] for expert in experts]
        if len(at) == len(self.experts) and at == list(range(len(at))):
            places = self._order
        else:
            places = np.concatenate(
                [self._order[self._starts[i] : self._starts[i + 1]] for i in at]
            )
        counts = np.array([self._starts[i + 1] - self._starts[i] for i in at], np.int32)
        return counts, places // np.int32(self._k), places
