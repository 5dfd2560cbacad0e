"""A mixture-of-experts model whose experts stay on disk: everything else loaded, experts modules
led to a runtime.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from multirate.errors import UserError, say_once
from multirate.experts.accelerated import AcceleratedResidual, AcceleratedWithAttention, Advance
from multirate.experts.controller import AdaptivePredictor
from multirate.experts.layout import NATIVE, ExpertTensors
from multirate.experts.memory import CudaCopies
from multirate.experts.named_policies import AHEAD_OF_TIME, parse_bytes, policy_named
from multirate.experts.policies import EvictionPolicy
from multirate.experts.predictors import (
    NextLayerGate,
    Popularity,
    Predictor,
    PreviousToken,
    SelectExperts,
)
from multirate.experts.runtime import IMPLEMENTATION, ExpertRuntime, ExpertSettings
from multirate.experts.shards import Shards
from multirate.experts.store import INDEX, ExpertStore
from multirate.loading.hub import resolve_accelerator
from multirate.methods.m2r2_experts.modules import ExpertPredictor
from multirate.runtime.decoder import Decoder
from multirate.runtime.finite import check_weights
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.hf.empty import empty_model
from multirate.runtime.hf.inspect import find_parts
from multirate.runtime.hf.parts import MoEParts
from multirate.runtime.load import BACKENDS
from multirate.runtime.native import library
from multirate.runtime.native.accelerated_residual import (
    NativeAcceleratedResidual,
    NativeResidualWithAttention,
)
from multirate.runtime.native.moe import NativeMoEDecoder
from multirate.runtime.quantised import expand, is_quantised
from multirate.training.checkpoint import Accelerator

_RENAMED = (("block_sparse_moe.", "mlp."),)  # checkpoint name → module name
_ATTRIBUTE = "_multirate_experts"  # of the model
PREDICTORS = ("none", "previous_token", "popularity", "next_layer_gate", "accelerated")


def experts_on_disk(model: Any) -> OffloadedExperts | None:
    """Where the experts of this model are read from, if they are not its own parameters."""
    found = getattr(model, "__dict__", {}).get(_ATTRIBUTE)
    return found if isinstance(found, OffloadedExperts) else None


def load_without_experts(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Any:
    """The causal LM in `folder`, in evaluation mode on `device`, with its experts' parameters on
    the meta device.

    dtype: None: the checkpoint's own. Raises UserError naming a parameter that the checkpoint
    lacks.
    """
    config = AutoConfig.from_pretrained(folder)
    with Shards(folder) as shards:
        experts = ExpertTensors(shards)
        dtype = dtype or experts.format.dtype
        model = empty_model(config, dtype)
        given = {
            _module_name(name): name for name in shards.names() if name not in experts.tensor_names
        }
        modules = dict(model.named_modules())
        tied = (
            set(getattr(model, "_tied_weights_keys", None) or ())
            if config.tie_word_embeddings
            else set()
        )
        for name, parameter in list(model.named_parameters()):
            path, _, leaf = name.rpartition(".")
            if ".experts." in f".{name}":
                continue
            if name not in given:
                if name in tied:
                    continue
                raise UserError(
                    f"{folder} has no tensor for {name}: it is not a checkpoint of "
                    f"{type(model).__name__}"
                )
            value = shards.tensor(given[name])
            if value.shape != parameter.shape:
                raise UserError(
                    f"{folder}: {given[name]} is {tuple(value.shape)}; the model's {name} is "
                    f"{tuple(parameter.shape)}"
                )
            setattr(modules[path], leaf, nn.Parameter(value.to(dtype), requires_grad=False))
    model.tie_weights()
    if (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder)
    with torch.no_grad():
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    return model.eval()


def _module_name(name: str) -> str:
    for old, new in _RENAMED:
        name = name.replace(old, new)
    return name


def _experts_function(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *_: Any, **__: Any
) -> Tensor:
    """What transformers calls in place of an experts module's forward."""
    offload: OffloadedExperts = self._multirate_offload
    return offload.forward(self, hidden_states, top_k_index, top_k_weights)


def _check_shapes(store: ExpertStore, layer: int, moe: MoEParts) -> None:
    """Raises UserError unless the store's records are the experts of this layer."""
    index, place = store.index, store.folder / INDEX
    for name, value in (("num_experts", moe.num_experts), ("top_k", moe.top_k)):
        if getattr(index, name) != value:
            raise UserError(
                f"{place}: {name} is {getattr(index, name)}; layer {layer} of the model has {value}"
            )
    packed = index.record.shapes
    for name, parameter in moe.experts.named_parameters():
        shape = tuple(parameter.shape[1:])
        if packed.get(name) != shape:
            raise UserError(
                f"{place}: {name} is {packed.get(name)}; layer {layer} of the model has {shape}"
            )


class OffloadedExperts:
    """Leads the experts modules of `model` to a runtime; the runtime may be exchanged between two
    generations.

    Sees the stream before the norm of each MoE block through hooks, which `remove` takes off again.
    """

    def __init__(self, model: Any, store: ExpertStore) -> None:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        self.model, self.store = model, store
        device = next(p.device for p in model.parameters() if not p.is_meta)
        self.copies: CudaCopies | None = CudaCopies(device) if device.type == "cuda" else None
        self.runtime: ExpertRuntime | None = None
        blocks = [(layer, layer.moe) for layer in find_parts(model).layers if layer.moe is not None]
        found = tuple(layer.index for layer, _ in blocks)
        if found != store.index.layers:
            held = list(store.index.layers)
            raise UserError(
                f"{store.folder} holds the experts of layers {held}; the model has experts in "
                f"layers {list(found)}"
            )
        self._moe: list[MoEParts] = [moe for _, moe in blocks]
        for layer, moe in blocks:
            _check_shapes(store, layer.index, moe)
        self._norms: list[nn.Module | None] = [None] * len(blocks)
        self._seen: tuple[nn.Module, Tensor] | None = None  # the norm that ran last, and its input
        self._handles = [handle for layer, _ in blocks for handle in layer.before_norms(self._see)]
        for row, moe in enumerate(self._moe):
            experts: Any = moe.experts
            experts._multirate_offload, experts._multirate_row = self, row
        model.__dict__[_ATTRIBUTE] = self
        self.policy, self.memory = AHEAD_OF_TIME, None  # type: str, str | int | None
        with contextlib.suppress(ValueError):  # registered already
            ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_function)
        self.native: NativeMoEDecoder | None = None
        self.trained_predictor: ExpertPredictor | None = None
        self._before = model.config._experts_implementation
        model.set_experts_implementation(IMPLEMENTATION)

    def _see(self, norm: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._seen = (norm, arguments[0])

    def decoder(self, backend: str = "auto") -> Decoder:
        """The decoder that runs the model: the native kernel if it can and the store is packed for
        it, else the model's own layers.

        Raises UserError for a backend that cannot be used.
        """
        if backend not in BACKENDS:
            raise UserError(f"backend={backend!r} is unknown; accepted: {', '.join(BACKENDS)}")
        check_weights(self.model)
        reason = NativeMoEDecoder.supports(self.model)
        if reason is None and self.store.index.layout != NATIVE:
            reason = (
                f"{self.store.folder} has the layout {self.store.index.layout}; pack it with "
                "multirate pack --layout native"
            )
        if backend == "native" and reason is not None:
            raise UserError(f"backend='native' cannot run this model: {reason}")
        if reason is not None and backend == "auto":
            library.say_unavailable(reason)
        if reason is not None or backend == "hf":
            self.native = None  # predictors must not count on its passes
            if is_quantised(self.model):
                why = "backend 'hf' was asked for" if backend == "hf" else reason
                say_once(f"expanding the quantised weights to bfloat16: {why}")
                expand(self.model)
            return HFDecoder(self.model)  # on a GPU too: what waits for a copy cannot be captured
        if self.native is None:
            self.native = NativeMoEDecoder(self.model, self._provider)
        return self.native

    def _provider(self) -> ExpertRuntime:
        if self.runtime is None:
            raise UserError("the model's experts are on disk and no expert runtime is in use")
        return self.runtime

    def use(
        self,
        settings: ExpertSettings | None = None,
        predictor: str | Predictor = "none",
        eviction: EvictionPolicy | None = None,
    ) -> ExpertRuntime:
        """A new runtime in place of the last, which is closed. predictor: a name of PREDICTORS, or
        one of yours.
        """
        if self.runtime is not None:
            self.runtime.close()
        self.runtime = ExpertRuntime(
            self.store, settings, self.predictor(predictor), eviction, self.copies
        )
        return self.runtime

    def use_policy(self, policy: str = "aot", memory: str | int | None = None) -> ExpertRuntime:
        """Starts a new runtime with the named policy (named_policies.py) and a memory size such as
        "2GB".

        Raises UserError for an unknown policy or an invalid size.
        """
        self.policy, self.memory = policy, memory
        settings = ExpertSettings(parse_bytes(memory), policy_named(policy).eviction)
        return self.use(settings, self.policy_predictor(policy) or "none")

    @property
    def has_accelerated(self) -> bool:
        """Whether a trained predictor was added that can be run here: with attention, only by the
        native kernel.
        """
        trained = self.trained_predictor
        return trained is not None and (self.native is not None or not trained.config.attention)

    def policy_predictor(self, policy: str) -> Predictor | None:
        """The predictor that a policy's name stands for (named_policies.py)."""
        if policy != AHEAD_OF_TIME:
            return self.predictor(policy_named(policy).predictor)
        names = [policy_named(policy).predictor, *(["accelerated"] if self.has_accelerated else [])]
        inner = {name: self.predictor(name) for name in names}
        return AdaptivePredictor({name: one for name, one in inner.items() if one is not None})

    def predictor(self, predictor: str | Predictor) -> Predictor | None:
        """A predictor for this model by name. Raises UserError for an unknown name."""
        rows, index = len(self._moe), self.store.index
        if isinstance(predictor, Predictor):
            return predictor
        if predictor == "none":
            return None
        if predictor == "previous_token":
            return PreviousToken(rows)
        if predictor == "popularity":
            return Popularity(rows, index.top_k)
        if predictor == "next_layer_gate":
            return NextLayerGate(self.selections())
        if predictor == "accelerated":
            if self.trained_predictor is None:
                raise UserError(
                    "expert policy accelerated needs a predictor; train one with multirate "
                    "train MODEL --objective experts --data FILE --out DIR, then pass "
                    "--expert-predictor DIR"
                )
            if self.trained_predictor.config.attention:
                return self._stream(self.trained_predictor)
            native = None if self.native is None else self._native_residual(self.trained_predictor)
            advance = self._advance(self.trained_predictor) if native is None else native.step
            return AcceleratedResidual(
                advance,
                index.layers,
                self.selections(),
                self.trained_predictor.config.ahead,
                native,
            )
        raise UserError(
            f"expert predictor {predictor!r} is unknown; accepted: {', '.join(PREDICTORS)}"
        )

    def _stream(self, predictor: ExpertPredictor) -> AcceleratedWithAttention:
        sketch, gated, down = predictor.sketch, predictor.gated, predictor.down
        if self.native is None or sketch is None or gated is None:
            raise UserError(
                "expert policy accelerated cannot run this predictor here; with attention=true "
                "it needs pruned experts (--option sketch) and the native kernel, so use the "
                "policy aot or next_layer_gate, or a predictor trained with --option "
                "attention=false"
            )
        native = NativeResidualWithAttention(
            None if down is None else down.detach(),
            predictor.up[0].detach(),
            sketch.detach(),
            gated.detach(),
            predictor.config.sketch,
            predictor.config.ahead,
        )
        return AcceleratedWithAttention(
            native, self.store.index.layers, self.selections(), self.native
        )

    @staticmethod
    def _native_residual(predictor: ExpertPredictor) -> NativeAcceleratedResidual:
        assert predictor.down is not None  # there is, without attention
        sketch = None if predictor.sketch is None else predictor.sketch.detach()
        ups = [up.detach() for up in predictor.up]
        return NativeAcceleratedResidual(
            predictor.down.detach(), ups, sketch, predictor.config.sketch
        )

    @staticmethod
    def _advance(predictor: ExpertPredictor) -> Advance:
        slow = predictor.float().eval().requires_grad_(False)
        return lambda layer, residual, state, depths, routing: [
            seen.to(residual.dtype)
            for seen in slow.step(layer, residual.float(), state, depths, routing)
        ]

    def start(
        self, backend: str = "auto", policy: str | None = None, memory: str | int | None = None
    ) -> Decoder:
        """A decoder, and a runtime as `use_policy` makes it; what is None is as it was last, at
        first aot and all.
        """
        policy, memory = policy or self.policy, self.memory if memory is None else memory
        self.use_policy("on_demand", memory)  # building a decoder may run the model once
        decoder = self.decoder(backend)
        self.use_policy(policy, memory)
        return decoder

    def add(self, accelerator: str | os.PathLike[str] | Accelerator) -> None:
        """A trained predictor (folder or hub id) for the policies accelerated and aot. UserError if
        it does not fit.
        """
        loaded = accelerator
        if not isinstance(loaded, Accelerator):
            loaded = Accelerator.from_pretrained(
                resolve_accelerator(loaded, self.model.config), self.model, torch.float32
            )
        if loaded.other_weights is not None:
            say_once(f"{loaded.other_weights}: fewer of the experts it predicts may be needed")
        if not isinstance(loaded.module, ExpertPredictor):
            raise UserError(
                f"{accelerator} is for drafts ({loaded.method}); accepted: a predictor from "
                "train --objective experts"
            )
        self.trained_predictor = loaded.module

    def selections(self) -> list[SelectExperts]:
        """For each row: the stream after attention → the experts that its norm, router and rule
        would choose.
        """
        return [self._selection(row) for row in range(len(self._moe))]

    def _selection(self, row: int) -> SelectExperts:
        if self.native is not None:
            native = self.native
            return lambda residual: torch.from_numpy(native.select(row, residual))

        @torch.no_grad()
        def select(residual: Tensor) -> Tensor:
            norm = self._norms[row]
            if (
                norm is None
            ):  # the layer has not run yet, so it is not known which norm is its MoE block's
                return torch.empty(0, 0, dtype=torch.int64, device="cpu")
            seen = self._seen
            try:
                return self._moe[row].route(norm(residual))[1]
            finally:
                self._seen = seen

        return select

    def forward(
        self, module: Any, hidden: Tensor, top_index: Tensor, top_weights: Tensor
    ) -> Tensor:
        """The experts module's forward: hidden [N, H] → [N, H]."""
        runtime = self._provider()
        row = module._multirate_row
        if self._seen is not None:
            self._norms[row], residual = self._seen[0], self._seen[1].reshape(-1, hidden.shape[-1])
        else:
            residual = hidden
        return runtime.forward(module, row, hidden, top_index, top_weights, residual)

    def remove(self) -> None:
        """Takes the hooks off and ends the runtime's threads. The model needs its experts back
        before it can run.
        """
        for handle in self._handles:
            handle.remove()
        if self.runtime is not None:
            self.runtime.close()
            self.runtime = None
        self.model.__dict__.pop(_ATTRIBUTE, None)
        self.model.set_experts_implementation(self._before)
