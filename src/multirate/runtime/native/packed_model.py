"""A model's weights, shape and position tables in the kernel's form."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from multirate.runtime.decoder import DecoderInfo, LayerAdapter
from multirate.runtime.hf.inspect import find_parts
from multirate.runtime.hf.parts import LayerParts
from multirate.runtime.native import abi
from multirate.runtime.native.adapters import AdapterPack
from multirate.runtime.native.families import (
    Family,
    activation,
    attention_scale,
    embed_scale,
    head_dim,
    residual_scale,
)
from multirate.runtime.native.formats import screened
from multirate.runtime.native.packing import Owner
from multirate.runtime.native.positions import PositionTables, Tables
from multirate.runtime.quantised import QuantisedWeight, Weight, dense, in_blocks, weight_of

AnyWeight = TypeVar("AnyWeight", Tensor, QuantisedWeight, Weight)
UNROTATED = "unrotated"  # the kind of position tables of layers that do not rotate


class PackedModel:
    """Packed copies of the weights of `model`, of this family."""

    def __init__(self, model: nn.Module, family: Family) -> None:
        parts: Any = find_parts(model)
        config: Any = parts.config
        self.info = DecoderInfo(
            architecture=type(model).__name__,
            num_layers=len(parts.layers),
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_positions=parts.max_positions,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            windows=tuple(layer.window for layer in parts.layers),
            tied_head=parts.tied_head,
            claimed_positions=parts.claimed_positions,
        )
        self._owner = Owner()
        self.eps = float(config.rms_norm_eps)
        self._family = family
        self.head_dim = head_dim(config)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.norm_weight = self._family.norm_weight(parts.norm)
        self.logit_scale = parts.logit_scale  # in the weights of the norm that the head reads by
        self.norm_address = self._owner.floats(self.norm_weight * self.logit_scale)
        self.head_weight, self.head_bias = (
            weight_of(parts.head),
            getattr(parts.head, "bias", None),
        )
        self.head = self._owner.linear(self.head_weight, self.head_bias)
        self.screen = abi.NULL
        if screened() and not in_blocks(self.head_weight):
            self.screen = self._owner.screen(dense(self.head_weight), self.head_bias)
            # a byte and its share of a scale in place of two bytes
            self._owner.saved_bytes = math.prod(self.head_weight.shape) * 30 // 32
        self._layers = list(parts.layers)
        self.positions = self._position_tables(parts, config)
        self.shape = self._shape(parts, config)
        self._head_order = self._family.rotary_order(self.head_dim, self.shape.rotary)
        self.packed_layers = abi.array(
            "Layer", [self.pack(i, self._owner) for i in range(len(self._layers))]
        )
        self.unread_bytes = self._owner.saved_bytes
        self.table = self._owner.table(
            weight_of(parts.embed_tokens), self.head if parts.tied_head else None
        )
        self._adapted: list[tuple[int, LayerAdapter]] = []

    def _shape(self, parts: Any, config: Any) -> abi.CData:
        return abi.new(
            "Shape",
            hidden=self.info.hidden_size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate=config.intermediate_size,
            vocab=self.info.vocab_size,
            rotary=2 * self.positions.width("cos"),
            activation=self._activation(),
            eps=self.eps,
            attention_scale=attention_scale(config),
            embed_scale=embed_scale(parts),
            residual_scale=residual_scale(config),
        )

    def _activation(self) -> int:
        """Of the layers that have gates of their own; of experts alone: theirs."""
        dense = (activation(layer) for layer in self._layers if layer.moe is None)
        return next(dense, None) or abi.constant("ACTIVATION_SILU")

    def _position_tables(self, parts: Any, config: Any) -> PositionTables:
        """What the model's rotary embeddings give, of each layer type, or under None of all layers,
        and what queries are multiplied by.
        """
        like = torch.zeros(1, 1, 1, dtype=torch.float32, device="cpu")
        # its own stays as it is: some types write to their buffers
        rotary = replace(parts, rotary_module=copy.deepcopy(parts.rotary_module))

        def compute(positions: Tensor) -> Tables:
            scale = self._family.query_scale(config, positions)
            scaled = {} if scale is None else {"query_scale": scale}
            found: dict[str | None, dict[str, Tensor]] = {UNROTATED: scaled}
            for kind, tables in rotary.position_embeddings(like, positions[None]).items():
                cos, sin = (table[0, :, : table.shape[-1] // 2] for table in tables)
                found[kind] = {"cos": cos, "sin": sin, **scaled}
            return found

        changing = parts.claimed_positions is not None
        return PositionTables(compute, parts.max_positions if changing else None)

    def _positions_of(self, index: int) -> abi.CData:
        """The tables that layer `index` reads."""
        layer, tables = self._layers[index], self.positions.packed
        if not self._family.rotates(layer):
            return tables[UNROTATED]
        return tables[None if None in tables else layer.layer_type]

    def pack(
        self, index: int, owner: Owner, deltas: Mapping[str, Tensor] | None = None
    ) -> abi.CData:
        """Layer `index` in the kernel's form. deltas: site (q, o, gate, up, down) → what is added
        to its weight.
        """
        layer = self.pack_attention(index, owner, deltas)
        gate, up, down = self._family.gate_up_down(self._layers[index], deltas)
        layer.gate_up = owner.gate_up(gate, up)[0]
        layer.down = owner.linear(down)[0]
        return layer

    def pack_attention(
        self, index: int, owner: Owner, deltas: Mapping[str, Tensor] | None = None
    ) -> abi.CData:
        """Layer `index` without its MLP."""
        layer, family = self._layers[index], self._family
        norms = {name: family.norm_weight(norm) for name, norm in family.norms(layer).items()}
        return abi.new(
            "Layer",
            qkv=owner.linear(*self._queries_keys_values(layer, deltas)),
            o=owner.linear(*family.output(layer, deltas)),
            **{name: owner.floats(weight) for name, weight in norms.items()},
            norm_all_heads="q_norm" in norms and len(norms["q_norm"]) > self.head_dim,
            norm_after_rotary=family.norms_after_rotary,
            positions=self._positions_of(index),
            window=layer.window or 0,
        )

    def _queries_keys_values(
        self, layer: LayerParts, deltas: Mapping[str, Tensor] | None
    ) -> tuple[list[Weight], Tensor | None]:
        """One linear layer: queries, then keys, then values."""
        made = self._family.queries_keys_values(layer, deltas)
        for site in ("q", "k"):
            weight, bias = made[site]
            made[site] = (
                self.rotary_halves(weight),
                None if bias is None else self.rotary_halves(bias),
            )
        biases = [bias for _, bias in made.values() if bias is not None]
        return [weight for weight, _ in made.values()], torch.cat(biases) if biases else None

    def rotary_halves(self, heads: AnyWeight) -> AnyWeight:
        """What makes queries or keys [heads · head_dim, …], each head's dimensions in the order in
        which the kernel rotates them: the first half of them against the second.
        """
        if self._head_order is None:
            return heads
        rows = torch.arange(len(heads), device="cpu").unflatten(0, (-1, self.head_dim))
        return heads[rows[:, self._head_order].flatten()]

    def head_rows(self, tokens: Tensor | None = None) -> Tensor:
        """The head's weights [n, d] for these tokens, int64 [n]; None: for all."""
        chosen = self.head_weight if tokens is None else self.head_weight[tokens.cpu()]
        return dense(chosen)

    def branch(self, **fields: Any) -> abi.CData:
        """A Branch over this model's layers and embedding; fields: those of what drafts."""
        return abi.new(
            "Branch",
            shape=self.shape,
            layers=self.packed_layers,
            table=self.table,
            **fields,
        )

    def packed_adapters(self, adapters: Mapping[int, LayerAdapter] | None) -> abi.CData | None:
        """The adapters in the kernel's form, packed on first use and again when other modules are
        given.
        """
        if not adapters:
            return None
        modules = sorted(adapters.items())
        if modules != self._adapted:  # compared by identity: modules have no other equality
            self._adapter_pack = AdapterPack(adapters, self.info.num_layers, self.rotary_halves)
            self._adapted = modules
        return self._adapter_pack.address
