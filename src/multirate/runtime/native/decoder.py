"""NativeDecoder: a model of one of `families.py`, on CPU, through the packed bf16 kernel.

The residual stream stays fp32 between layers (a model run in bf16 by transformers rounds it after
every layer); products take bf16 inputs and bf16 weights. A row's result does not depend on which
other rows share its call, so drafting and verifying give bit-identical logits: speculation in bf16
is exact, not nearly so.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from multirate.errors import UserError
from multirate.runtime.decoder import (
    Decoder,
    DecoderInfo,
    LayerAdapter,
    NotPlain,
    VerifiedDraft,
)
from multirate.runtime.draft_branch import Drafting, DraftWeights
from multirate.runtime.fused import DraftShape, FusedSequences, Lookups
from multirate.runtime.hf.decoder import (
    check_finite,
    evaluation_mode,
    probe_tokens,
    relative_difference,
)
from multirate.runtime.hf.inspect import find_parts, ropes
from multirate.runtime.hf.parts import LayerParts
from multirate.runtime.kv_cache import LayerKV
from multirate.runtime.machine import free_memory
from multirate.runtime.native import abi, library
from multirate.runtime.native.adapters import AdapterPack
from multirate.runtime.native.cache import NativeKVCache
from multirate.runtime.native.draft_branch import NativeDrafting
from multirate.runtime.native.draft_verification import MAX_NODES, DraftVerification
from multirate.runtime.native.families import (
    FAMILIES,
    Family,
    activation,
    attention_scale,
    embed_scale,
    head_dim,
    residual_scale,
)
from multirate.runtime.native.formats import screened
from multirate.runtime.native.fused_steps import NativeFusedSequences
from multirate.runtime.native.packing import Owner, packed_bytes
from multirate.runtime.native.plain import unknown_part
from multirate.runtime.native.positions import PositionTables, Tables
from multirate.runtime.noise import NOT_FINITE, Noise
from multirate.runtime.quantised import (
    QuantisedWeight,
    Weight,
    dense,
    in_blocks,
    is_quantised,
    weight_bytes,
    weight_of,
)
from multirate.runtime.rows import Rows
from multirate.runtime.time_split import TimeSplit

AnyWeight = TypeVar("AnyWeight", Tensor, QuantisedWeight, Weight)
SPARE_BYTES = 64 << 20  # the largest K/V memory kept for the next generation
UNROTATED = "unrotated"  # the kind of position tables of layers that do not rotate
PROBE_LIMIT = 0.3
"""What rounding, the model's own above all, explains of the logits' relative difference. A part
that is not known makes more.
"""


class OtherLogits(UserError):
    """What the kernel computes is not what the model does."""


class NativeDecoder(Decoder):
    """Runs `model` (bf16, CPU, of a family that the kernel knows) with packed copies of its
    weights. Inputs and outputs are fp32 [N, d].

    Decoders may run side by side in several threads, each of them one call at a time. `workspace`:
    the memory its calls work in; they use as many threads as torch had when the decoder was made.
    """

    info: DecoderInfo
    runs_the_model = False
    families: Mapping[str, Family] = FAMILIES
    """What it knows, by transformers' name of the model type."""
    probes = True
    """Whether a few tokens are compared with the model's own forward when the decoder is made."""
    supports_fused = True
    """Whether the kernel can run all layers by itself, and so fused steps: draft and verification
    in one call.
    """

    @staticmethod
    def supports(model: nn.Module) -> str | None:
        """None when the model can be run here, else the reason."""
        config = _text_config(model)
        kind = getattr(config, "model_type", "unknown")
        if kind not in FAMILIES:
            return f"the native kernel supports {', '.join(FAMILIES)}, not {kind}"
        return NativeDecoder.cannot_run(config, model, FAMILIES[kind]) or _too_large(model)

    @staticmethod
    def cannot_run(config: Any, model: nn.Module, family: Family) -> str | None:
        """What of a known family's configuration the kernel cannot run; None: nothing."""
        parameter = next(model.parameters())
        if parameter.is_meta and not is_quantised(model):
            return NotPlain("its weights are offloaded")
        if parameter.device.type not in ("cpu", "meta") or parameter.dtype != torch.bfloat16:
            return (
                f"the native kernel runs bfloat16 on CPU, not {parameter.dtype} on "
                f"{parameter.device}"
            )
        d, dim = config.hidden_size, head_dim(config)
        if d % 64 or config.intermediate_size % 32 or dim % 16 or dim > 256:
            return (
                f"hidden size {d}, intermediate size {config.intermediate_size} or head size "
                f"{dim} is not a multiple of the kernel's tile size"
            )
        if (config.num_attention_heads * dim) % 64 or (2 * config.num_key_value_heads * dim) % 64:
            return "the query, key and value widths are not multiples of the kernel's tile size"
        if getattr(config, "mlp_bias", False):
            return "the native kernel does not support biases in the MLP's projections"
        for rope in ropes(config):
            if family.changes_with_length(rope):
                return f"rotary type {rope.get('rope_type')} changes with the length"
        try:
            unknown = unknown_part(find_parts(model), family)
        except UserError as reason:  # no backend can run it
            return str(reason)
        if unknown is not None:
            return unknown
        try:
            library.kernel()
        except library.NativeUnavailable as problem:
            return str(problem)
        return None

    @staticmethod
    def say_fallback(reason: str) -> None:
        """Warns (once, see library.say_unavailable) that the model's own layers run, if the
        `reason` from `supports` is a missing kernel.
        """
        library.say_unavailable(reason)

    def __init__(self, model: nn.Module) -> None:
        reason = type(self).supports(model)
        if reason is not None:
            raise UserError(f"backend='native' cannot run this model: {reason}")
        self._library = library.kernel()
        self.workspace = library.Workspace()
        self._work = self.workspace.address
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
        self._family = self.families[config.model_type]
        self.head_dim = head_dim(config)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.norm_weight = self._family.norm_weight(parts.norm)
        self._logit_scale = parts.logit_scale  # in the weights of the norm that the head reads by
        self.norm_address = self._owner.floats(self.norm_weight * self._logit_scale)
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
        self._table = self._owner.table(
            weight_of(parts.embed_tokens), self.head if parts.tied_head else None
        )
        self._norm = abi.at(self.norm_address)
        self._logits = abi.floats_for(0)
        self._spare: NativeKVCache | None = None
        self._verification: DraftVerification | None = None
        self._adapted: list[tuple[int, LayerAdapter]] = []
        # A quantised model has no forward to compare with, short of expanding it, which would take
        # the time and memory that its format saves; the same family is compared as bf16 models.
        if self.probes and not is_quantised(model):
            self._probe(model)

    @torch.no_grad()
    def _probe(self, model: Any) -> None:
        """Compares the kernel's logits of a few tokens with those of the model's own forward, so
        that an unknown part, for example in another release of transformers, cannot silently give
        other text.
        """
        ids = probe_tokens(self.info.vocab_size)
        with evaluation_mode(model):
            expected = model.forward(ids[None], use_cache=False).logits[
                0, :, : self.info.vocab_size
            ]
        rows = Rows.causal(0, 0, len(ids))
        cache = self.new_cache(1, len(ids))
        x = self.layers(self.embed(ids, rows.pos), rows, 0, self.info.num_layers, cache)
        logits = self.logits(x)
        check_finite(expected)
        known = expected.isfinite()  # a model may rule tokens out with -inf
        difference = relative_difference(logits[known], expected[known])
        if not difference <= PROBE_LIMIT:
            raise OtherLogits(
                f"the kernel's logits of {len(ids)} tokens differ from the model's own by "
                f"{difference:.0%} of their norm, so the model has an unknown part"
            )

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

    # -- Decoder -----------------------------------------------------------------------------------

    def new_cache(self, batch: int, capacity: int) -> NativeKVCache:
        spare, self._spare = self._spare, None
        if (
            spare is not None
            and spare.batch == batch
            and capacity <= spare.capacity <= 4 * capacity + 1024
        ):
            spare.reset()
            return spare
        return self.cache_of(self.info.num_layers, batch, capacity, self.kv_heads, self.positions)

    def release_cache(self, cache: Any) -> None:
        self._spare = cache if cache.nbytes() <= SPARE_BYTES else None

    def cache_of(
        self, layers: int, batch: int, capacity: int, kv_heads: int, positions: PositionTables
    ) -> NativeKVCache:
        """A cache for other layers run by this kernel (an accelerated block's own keys and values),
        which read such tables.
        """
        kv = LayerKV(kv_heads, self.head_dim, self.head_dim, torch.bfloat16, self.info.device)
        return NativeKVCache(batch, capacity, [kv] * layers, positions)

    def embed(self, ids: Tensor, pos: np.ndarray) -> Tensor:
        ids = ids.to(torch.int64).contiguous()
        x = abi.floats_for(len(ids), self.info.hidden_size)
        self._library.mr_embed(
            self._table,
            abi.tensor(ids),
            len(ids),
            x.shape[1],
            self.shape.embed_scale,
            abi.tensor(x),
        )
        return x

    def layers(
        self,
        x: Tensor,
        rows: Rows,
        start: int,
        stop: int,
        cache: Any,
        adapters: Mapping[int, LayerAdapter] | None = None,
    ) -> Tensor:
        if start >= stop:
            return x
        x = x.float().clone(memory_format=torch.contiguous_format)
        self._run(x, rows, start, stop, cache, self.packed_adapters(adapters))
        return x

    def _run(
        self,
        x: Tensor,
        rows: Rows,
        start: int,
        stop: int,
        cache: NativeKVCache,
        adapters: abi.CData | None,
    ) -> None:
        cache.make_room(rows)
        self._library.mr_layers(
            self._work,
            self.shape,
            self.packed_layers,
            cache.address,
            adapters or abi.NULL,
            abi.rows_of(rows, cache.capacity),
            abi.tensor(x),
            start,
            stop,
        )

    def passing_layers(
        self, x: Tensor, rows: Rows, cache: Any, by: abi.CData, limit: float, eps: float
    ) -> tuple[Tensor, list[int]]:
        """All layers on one row of each sequence, x [n, d], but those that a row passes by → ([n,
        d], how many layers each row has run). by: `PassBy` of every layer, whose counts of slots it
        changes; eps: of its RMS.
        """
        cache.make_room(rows)
        x = x.float().clone(memory_format=torch.contiguous_format)
        ran = np.empty(len(rows), np.int32)
        self._library.mr_passing_layers(
            self._work,
            self.shape,
            self.packed_layers,
            cache.address,
            by,
            limit,
            eps,
            abi.rows_of(rows, cache.capacity),
            abi.tensor(x),
            self.info.num_layers,
            abi.ints(ran),
        )
        return x, ran.tolist()

    def fill_kv(self, rows: Rows, hidden: Tensor, start: int, stop: int, cache: Any) -> None:
        x = hidden.float().contiguous()
        cache.make_room(rows)
        self._library.mr_fill_kv(
            self._work,
            self.shape,
            self.packed_layers,
            cache.address,
            abi.rows_of(rows, cache.capacity),
            abi.tensor(x),
            start,
            stop,
        )

    def next_tokens(
        self,
        rows: Rows,
        cache: Any,
        ids: Sequence[int] | None = None,
        x: Tensor | None = None,
        start: int = 0,
        noise: Sequence[Noise] | None = None,
    ) -> tuple[Tensor, list[int]]:
        n = len(rows.seq)
        cache.make_room(rows)
        if x is None:
            x = abi.floats_for(n, self.info.hidden_size)
        else:
            x = x.float().clone(memory_format=torch.contiguous_format)
        if self._logits.numel() < n * self.head.outputs:
            self._logits = abi.floats_for(n * self.head.outputs)
        tokens = np.empty(n, np.int64)
        entering = None if ids is None else np.array(ids, dtype=np.int64)
        added = None if noise is None else abi.noise_of(noise)
        self._library.mr_argmax_pass(
            self._work,
            self.shape,
            self.packed_layers,
            cache.address,
            abi.rows_of(rows, cache.capacity),
            self._table,
            abi.NULL if entering is None else abi.longs(entering),
            abi.tensor(x),
            start,
            self.info.num_layers,
            self.head,
            self.screen,
            self._norm,
            added or abi.NULL,
            abi.tensor(self._logits),
            abi.longs(tokens),
        )
        return x, _finite(tokens)

    def stream(self, **fields: Any) -> abi.CData:
        """A Stream over this model's layers and embedding; fields: those of what drafts."""
        return abi.new(
            "Stream",
            shape=self.shape,
            layers=self.packed_layers,
            table=self._table,
            **fields,
        )

    @property
    def threads(self) -> int:
        return self.workspace.threads

    def spent(self) -> TimeSplit:
        return self.workspace.spent()

    def verify_draft(
        self,
        cache: Any,
        seq: int,
        ids: Sequence[int],
        parents: Sequence[int],
        noise: Noise | None = None,
        top: int = 0,
        x: Tensor | None = None,
        start: int = 0,
    ) -> VerifiedDraft | None:
        if not self.supports_fused or len(parents) > MAX_NODES:
            return None
        if self._verification is None:
            self._verification = DraftVerification(
                self._work,
                self.stream(),
                self.info.num_layers,
                self.head,
                self.screen,
                self.norm_address,
            )
        return self._verification.run(cache, seq, ids, parents, noise, top, x, start)

    def drafting(self, weights: DraftWeights) -> Drafting | None:
        return NativeDrafting(self, weights) if self.supports_fused else None

    def text_steps(self, nodes: int, lookups: Lookups) -> FusedSequences | None:
        if not self.supports_fused or nodes > MAX_NODES:
            return None
        shape = DraftShape(nodes, 0, 0, 0.0, 0.0, refresh=False)  # there is no branch
        return NativeFusedSequences(self, self.stream(), None, None, shape, lookups)

    def noisy_argmax(self, logits: Tensor, noise: Sequence[Noise]) -> list[int]:
        if logits.dtype != torch.float32 or logits.stride(1) != 1:
            return super().noisy_argmax(logits, noise)
        tokens = np.empty(len(logits), np.int64)
        self._library.mr_noisy_argmax(
            abi.tensor(logits, strided=True),
            len(logits),
            logits.shape[1],
            logits.stride(0),
            abi.noise_of(noise),
            abi.longs(tokens),
        )
        return _finite(tokens)

    def norm(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.norm_weight

    def unembed(self, normed: Tensor) -> Tensor:
        logits = self.product(self.head, normed, None)[:, : self.info.vocab_size]
        return logits if self._logit_scale == 1.0 else logits * self._logit_scale

    def logits(self, x: Tensor) -> Tensor:
        return self.product(self.head, x, self.norm_address)[:, : self.info.vocab_size]

    def product(
        self,
        linear: abi.CData,
        x: Tensor,
        norm: abi.CData | None,
        into: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        """W · (RMSNorm(x) or x): x fp32 [N, in] → [N, out], added to `into` when given. eps: of a
        norm that is not the model's.
        """
        x = x.float().contiguous()
        y = abi.floats_for(len(x), linear.outputs) if into is None else into
        self._library.mr_linear(
            self._work,
            linear,
            abi.tensor(x),
            abi.at(norm),
            self.eps if eps is None else eps,
            len(x),
            abi.tensor(y),
            int(into is not None),
        )
        return y

    def top(
        self,
        head: abi.CData,
        vocab: int,
        x: Tensor,
        count: int,
        sharpness: float = 1.0,
        noise: Sequence[Noise] | None = None,
        token_map: abi.CData | None = None,
        norm: abi.CData | None = None,
        normed: bool = False,
        exact: abi.CData | None = None,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The ``count`` likeliest of ``head``'s ``vocab`` outputs for each row of x [n, d], best
        first, and their probabilities under softmax(sharpness · logits). noise[i]: added to the
        logits of row i, that of the outputs' tokens, int64 [vocab] at token_map (None: the first
        ones). norm: of the norm before the head (None: the model's). normed:
        x has passed its norm already. exact: what ``head`` is a quantised copy of, bf16
        [vocab, d], which has the last word on the likeliest; None: nothing has.
        """
        added = None if noise is None else abi.noise_of(noise)
        if normed and self._logit_scale != 1.0:
            x = x * self._logit_scale
        x, n = x.contiguous(), len(x)
        logits = abi.floats_for(n, head.outputs)
        ids, probs = np.empty((n, count), np.int64), np.empty((n, count), np.float32)
        self._library.mr_head_top(
            self._work,
            head,
            abi.NULL if normed else abi.at(norm) if norm else self._norm,
            self.eps,
            abi.tensor(x),
            n,
            vocab,
            added or abi.NULL,
            abi.at(token_map),
            abi.at(exact),
            count,
            sharpness,
            abi.tensor(logits),
            abi.longs(ids),
            abi.floats(probs),
        )
        return ids.tolist(), probs.tolist()

    def likeliest(self, logits: Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
        n, vocab = logits.shape
        if not n or logits.dtype != torch.float32 or logits.stride(1) != 1:
            return super().likeliest(logits, count)
        ids, probs = np.empty((n, count), np.int64), np.empty((n, count), np.float32)
        self._library.mr_top(
            abi.tensor(logits, strided=True),
            n,
            vocab,
            logits.stride(0),
            count,
            1.0,
            abi.longs(ids),
            abi.floats(probs),
        )
        return ids.tolist(), probs.tolist()

    def top_tokens(self, logits: Tensor, count: int) -> list[list[int]]:
        n, vocab = logits.shape
        if not n or logits.dtype != torch.float32 or logits.stride(1) != 1:
            return super().top_tokens(logits, count)
        ids = np.empty((n, count), np.int64)
        self._library.mr_best(
            self._work,
            abi.tensor(logits, strided=True),
            n,
            vocab,
            logits.stride(0),
            count,
            abi.longs(ids),
        )
        best: list[list[int]] = ids.tolist()
        return best

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


def _finite(tokens: np.ndarray) -> list[int]:
    """The kernel's tokens, which are -1 where logits were not finite."""
    chosen: list[int] = tokens.tolist()
    if min(chosen, default=0) < 0:
        raise UserError(NOT_FINITE)
    return chosen


def _too_large(model: nn.Module) -> str | None:
    """Whether there is no room for packed weights beside the model's own."""
    free = free_memory()
    if is_quantised(model):
        needed = weight_bytes(model)
        if free is not None and needed > free:  # to expand them would need more still
            raise UserError(
                f"the model does not fit into memory: packing its weights needs {needed / 1e9:.1f} "
                f"GB, but only {free / 1e9:.1f} GB are free"
            )
        return None
    head = model.get_output_embeddings()  # type: ignore[operator]
    needed = packed_bytes(sum(p.numel() for p in model.parameters()), head.weight.numel())
    if free is None or needed <= free:
        return None
    return NotPlain(
        f"packing its weights needs {needed / 1000000000.0:.1f} GB of memory, but only "
        f"{free / 1000000000.0:.1f} GB are free"
    )


def _text_config(model: nn.Module) -> Any:
    """The configuration of the language model in `model`, which may also have an image encoder."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
