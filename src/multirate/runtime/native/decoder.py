"""NativeDecoder: a model of one of `families.py`, on CPU, through the packed bf16 kernel.

The residual stream stays fp32 between layers (a model run in bf16 by transformers rounds it after
every layer); products take bf16 inputs and bf16 weights. A row's result does not depend on which
other rows share its call, so drafting and verifying give bit-identical logits: speculation in bf16
is exact, not nearly so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multirate.errors import UserError
from multirate.runtime.decoder import Decoder, DecoderInfo, LayerAdapter, VerifiedDraft
from multirate.runtime.draft_branch import Drafting, DraftWeights
from multirate.runtime.fused import DraftShape, FusedSequences, Lookups
from multirate.runtime.hf.decoder import (
    check_finite,
    evaluation_mode,
    probe_tokens,
    relative_difference,
)
from multirate.runtime.kv_cache import LayerKV
from multirate.runtime.native import abi, library
from multirate.runtime.native.cache import NativeKVCache
from multirate.runtime.native.draft_branch import NativeDrafting
from multirate.runtime.native.draft_verification import MAX_NODES, DraftVerification
from multirate.runtime.native.families import FAMILIES, Family
from multirate.runtime.native.fused_sequences import NativeFusedSequences
from multirate.runtime.native.packed_model import PackedModel
from multirate.runtime.native.positions import PositionTables
from multirate.runtime.native.supported import cannot_run, text_config, too_large
from multirate.runtime.noise import NOT_FINITE, Noise
from multirate.runtime.quantised import is_quantised
from multirate.runtime.rows import Rows
from multirate.runtime.time_split import TimeSplit

SPARE_BYTES = 64 << 20  # the largest K/V memory kept for the next generation
PROBE_LIMIT = 0.3
"""What rounding, the model's own above all, explains of the logits' relative difference. A part
that is not known makes more.
"""


class OtherLogits(UserError):
    """What the kernel computes is not what the model does."""


class NativeDecoder(PackedModel, Decoder):
    """Runs `model` (bf16, CPU, of a family that the kernel knows) with packed copies of its
    weights. Inputs and outputs are fp32 [N, d].

    Decoders may run side by side in several threads, each of them one call at a time. `workspace`:
    the memory its calls work in; they use as many threads as torch had when the decoder was made.
    """

    info: DecoderInfo
    backend = "native"
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
        config = text_config(model)
        kind = getattr(config, "model_type", "unknown")
        if kind not in FAMILIES:
            return f"the native kernel supports {', '.join(FAMILIES)}, not {kind}"
        return cannot_run(config, model, FAMILIES[kind]) or too_large(model)

    def __init__(self, model: nn.Module) -> None:
        reason = type(self).supports(model)
        if reason is not None:
            raise UserError(f"backend='native' cannot run this model: {reason}")
        super().__init__(model, self.families[text_config(model).model_type])
        self._library = library.kernel()
        self.workspace = library.Workspace()
        self._work = self.workspace.address
        self._logits = abi.floats_for(0)
        self._spare: NativeKVCache | None = None
        self._verification: DraftVerification | None = None
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
            self.table,
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
        x = abi.copied(x)
        self._run(x, rows, start, stop, cache, adapters)
        return x

    def _run(
        self,
        x: Tensor,
        rows: Rows,
        start: int,
        stop: int,
        cache: NativeKVCache,
        adapters: Mapping[int, LayerAdapter] | None = None,
    ) -> None:
        """Layers [start, stop) on x [N, d], in place."""
        cache.make_room(rows)
        self._library.mr_layers(
            self._work,
            self.shape,
            self.packed_layers,
            cache.address,
            self.packed_adapters(adapters) or abi.NULL,
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
        x = abi.copied(x)
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
        if not self.supports_fused:
            return super().next_tokens(rows, cache, ids, x, start, noise)
        n = len(rows.seq)
        cache.make_room(rows)
        x = abi.floats_for(n, self.info.hidden_size) if x is None else abi.copied(x)
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
            self.table,
            abi.NULL if entering is None else abi.longs(entering),
            abi.tensor(x),
            start,
            self.info.num_layers,
            self.head,
            self.screen,
            self.norm_address,
            added or abi.NULL,
            abi.tensor(self._logits),
            abi.longs(tokens),
        )
        return x, _finite(tokens)

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
            self._verification = DraftVerification(self)
        return self._verification.run(cache, seq, ids, parents, noise, top, x, start)

    def drafting(self, weights: DraftWeights) -> Drafting | None:
        return NativeDrafting(self, weights) if self.supports_fused else None

    def text_steps(self, nodes: int, lookups: Lookups) -> FusedSequences | None:
        if not self.supports_fused or nodes > MAX_NODES:
            return None
        shape = DraftShape(nodes, 0, 0, 0.0, 0.0, backfill=False)  # there is no branch
        return NativeFusedSequences(self, self.branch(), None, None, shape, lookups)

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
        return logits if self.logit_scale == 1.0 else logits * self.logit_scale

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


def _finite(tokens: np.ndarray) -> list[int]:
    """The kernel's tokens, which are -1 where logits were not finite."""
    chosen: list[int] = tokens.tolist()
    if min(chosen, default=0) < 0:
        raise UserError(NOT_FINITE)
    return chosen
