"""A decoder that calls the transformers model's own layer modules: any architecture, any dtype, no
forked code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from multirate.errors import UserError
from multirate.runtime.decoder import Decoder, DecoderInfo, LayerAdapter
from multirate.runtime.hf.adapter_hooks import apply_adapter
from multirate.runtime.hf.inspect import find_parts
from multirate.runtime.hf.layer_caches import RecordingKV
from multirate.runtime.hf.parts import ModelParts
from multirate.runtime.hf.row_plan import RowPlan
from multirate.runtime.kv_cache import KVCache, LayerKV
from multirate.runtime.noise import NOT_FINITE
from multirate.runtime.rows import Rows
from multirate.runtime.transfer import to_device


class HFDecoder(Decoder):
    """Runs rows through the layers of `model`, without changing it.

    Construction compares a few tokens through the model's own forward with the located parts: in
    one pass, then in passes like those of decoding (several sequences, one row, a draft). A model
    whose logits differ is rejected with a UserError, so that neither an unknown part nor one whose
    result for a row depends on other rows can silently give wrong text.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parts: ModelParts = find_parts(model)
        parts = self.parts
        moe = next((m for m in parts.moe if m is not None), None)
        self.info = DecoderInfo(
            architecture=str(parts.config.model_type),
            num_layers=len(parts.layers),
            hidden_size=int(parts.config.hidden_size),
            vocab_size=int(parts.config.vocab_size),
            max_positions=parts.max_positions,
            dtype=parts.dtype,
            device=parts.device,
            windows=parts.windows,
            num_experts=0 if moe is None else moe.num_experts,
            experts_per_token=0 if moe is None else moe.top_k,
            tied_head=parts.tied_head,
            claimed_positions=parts.claimed_positions,
        )
        self._coarsest = _coarsest(model)
        self._plan: RowPlan | None = None
        self._kv_layout = self._probe()

    # -- Decoder -----------------------------------------------------------------------------------

    @property
    def pass_dependent(self) -> str | None:
        kind = self.info.device.type
        if torch.is_autocast_enabled(kind):
            return _name(torch.get_autocast_dtype(kind))
        if self._coarsest is not None:
            return _name(self._coarsest)
        backend = torch.backends.cuda if kind == "cuda" else torch.backends.mkldnn
        precision: str = backend.matmul.fp32_precision
        return precision if precision in ("tf32", "bf16") else None

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(batch, capacity, self._kv_layout)

    @torch.no_grad()
    def embed(self, ids: Tensor, pos: np.ndarray) -> Tensor:
        positions = to_device(np.asarray(pos, dtype=np.int64), self.info.device)
        return self.parts.embed(ids.to(self.info.device), positions)

    @torch.no_grad()
    def layers(
        self,
        x: Tensor,
        rows: Rows,
        start: int,
        stop: int,
        cache: KVCache,
        adapters: Mapping[int, LayerAdapter] | None = None,
    ) -> Tensor:
        if len(rows) != len(x):
            raise ValueError(f"x has {len(x)} rows but rows describes {len(rows)}")
        if not len(rows) or start >= stop:
            return x
        parts = self.parts
        with self._frozen() as implementation:
            plan = self._plan_for(rows, cache, x, implementation)
            hidden = plan.pad(x)
            if plan.rotary is None:
                plan.rotary = parts.position_embeddings(hidden, plan.position_ids)
            for i in range(start, stop):
                adapter = adapters.get(i) if adapters and plan.accelerated is not None else None
                layer = parts.layers[i]
                with (
                    nullcontext()
                    if adapter is None
                    else apply_adapter(layer, adapter, plan.accelerated)
                ):
                    hidden = parts.run_layer(
                        i, hidden, plan.mask(layer.window), plan.position_ids, plan.rotary, plan
                    )
            return plan.unpad(hidden)

    @torch.no_grad()
    def fill_kv(self, rows: Rows, hidden: Tensor, start: int, stop: int, cache: KVCache) -> None:
        if len(rows) != len(hidden):
            raise ValueError(f"hidden has {len(hidden)} rows but rows describes {len(rows)}")
        if not len(rows) or start >= stop:
            return
        parts = self.parts
        with self._frozen() as implementation:
            plan = self._plan_for(rows, cache, hidden, implementation)
            x = plan.pad(hidden)
            if plan.rotary is None:
                plan.rotary = parts.position_embeddings(x, plan.position_ids)
            for i in range(start, stop):
                parts.run_to_kv(
                    i, x, plan.mask(parts.layers[i].window), plan.position_ids, plan.rotary, plan
                )

    @torch.no_grad()
    def norm(self, x: Tensor) -> Tensor:
        return self.parts.final_norm(x)

    @torch.no_grad()
    def unembed(self, normed: Tensor) -> Tensor:
        return self.parts.unembed(normed).float()

    # -- internals ---------------------------------------------------------------------------------

    def _plan_for(self, rows: Rows, cache: KVCache, x: Tensor, implementation: str) -> RowPlan:
        # The same rows usually come twice or more: the layers are run in pieces [0, G) and [G, L).
        if self._plan is None or not self._plan.current(rows, cache):
            self._plan = RowPlan(
                rows, cache, x.device, x.dtype, fused_causal=implementation == "sdpa"
            )
        return self._plan

    @contextmanager
    def _frozen(self) -> Iterator[str]:
        """Evaluation mode and a mask-honouring attention, both restored afterwards."""
        with evaluation_mode(self.parts.model), self.parts.attention() as implementation:
            yield implementation

    @torch.no_grad()
    def _probe(self) -> list[LayerKV]:
        """Compares the parts with the model's own forward on a few tokens; returns each layer's K/V
        shape.
        """
        parts, name = self.parts, type(self.parts.model).__name__
        count = min(_probe_rows(parts), self.info.max_positions or PROBE_ROWS)
        ids = probe_tokens(self.info.vocab_size, count).to(parts.device)[None]
        positions = torch.arange(ids.shape[1], device=parts.device)[None]
        recorded = RecordingKV()
        try:
            with self._frozen():
                # not called: a compiled model would be compiled for this
                expected = parts.model.forward(ids, use_cache=False).logits
                hidden = parts.embed(ids, positions)
                masks = parts.causal_masks(ids.shape[1], dtype=hidden.dtype)
                rotary = parts.position_embeddings(hidden, positions)
                for i in range(len(parts.layers)):
                    hidden = parts.run_layer(i, hidden, masks[i], positions, rotary, recorded)
                logits = parts.logits(hidden)
        except (TypeError, AttributeError, KeyError, IndexError, ValueError, RuntimeError) as error:
            raise UserError(
                f"cannot run {name}: its layers could not be called one by one ({error})"
            ) from error
        if logits.shape != expected.shape:
            raise UserError(
                f"cannot run {name}: its forward gives logits of {tuple(expected.shape)} for "
                f"{ids.shape[1]} tokens (perhaps it adds a prompt of its own), so it has an "
                "unknown part"
            )
        check_finite(expected)
        difference = relative_difference(logits, expected)
        if not difference <= rounding_limit(self.info.dtype):
            raise UserError(
                f"cannot run {name}: its layers, run one by one, give other logits than its own "
                f"forward (relative difference {difference:.1e}), so it has an unknown part"
            )
        layout = [
            LayerKV(k.shape[1], k.shape[3], recorded.values[i].shape[3], k.dtype, k.device)
            for i, k in sorted(recorded.keys.items())
        ]
        try:
            self._probe_passes(ids[0], expected[0], layout)
        except (TypeError, AttributeError, KeyError, IndexError, ValueError, RuntimeError) as error:
            raise UserError(
                f"cannot run {name}: its layers accept only passes over whole texts ({error})"
            ) from error
        return layout

    def _probe_passes(self, ids: Tensor, expected: Tensor, layout: list[LayerKV]) -> None:
        """Compares the logits [T, V] of one pass over ids [T] with those of passes of other
        lengths. Raises UserError if a row's logits depend on the rest of its pass.
        """
        count, half = len(ids), max(1, len(ids) // 2)
        cache = KVCache(2, count + 2, layout)
        # A branch that is not followed, before the one that is.
        draft = Rows.draft_tree(0, half + 1, [0, 0, *range(2, count - half - 1)])
        branch = [half + 1, 0, *range(half + 2, count)]
        passes = [
            (Rows.concat([Rows.causal(0, 0, half), Rows.causal(1, 0, 1)]), [*range(half), 0]),
            (Rows.causal(0, half, 1), [half]),
            (draft, branch),
        ]
        far = 0
        for rows, places in passes[: 3 if count - half > 2 else 1]:
            x = HFDecoder.embed(self, ids[places], rows.pos)
            x = HFDecoder.layers(self, x, rows, 0, len(self.parts.layers), cache)
            got = self.parts.logits(x).float()
            for seq in np.unique(rows.seq):
                cache.commit(int(seq), int((rows.seq == seq).sum()))
            difference = (got - expected[places].float()).norm(dim=-1)
            difference = difference / expected[places].float().norm(dim=-1).clamp(min=1e-12)
            if rows is draft:
                difference[1] = 0
            far += int((~(difference <= 2 * rounding_limit(self.info.dtype))).sum())
        if far > self._most_rounded(count):
            name = type(self.parts.model).__name__
            raise UserError(
                f"cannot run {name}: {far} of {count + 1} tokens have other logits in passes of "
                "other lengths, so it has a part whose result for a token depends on other "
                "tokens in the pass"
            )

    def _most_rounded(self, count: int) -> int:
        """How many of `count` tokens rounding alone may move far."""
        if self.info.dtype.itemsize >= 4:
            return 0
        # Where two experts are nearly as good, rounding decides between them. A row that is nearly
        # all one channel may be far off where products of other shapes add in another order, as on
        # processors with AMX.
        return count // 4 if any(self.parts.moe) else count // 12


def _coarsest(model: nn.Module) -> torch.dtype | None:
    """The coarsest type of the model's weights; None: none has fewer bits than float32."""
    kinds = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    few = [kind for kind in kinds if torch.finfo(kind).bits < 32]
    return max(few, key=lambda kind: torch.finfo(kind).eps, default=None)


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


PROBE_ROWS = 24


def _probe_rows(parts: ModelParts) -> int:
    """How many tokens are compared: few where experts have to be read from a disk for them."""
    experts = [moe.experts for moe in parts.moe if moe is not None]
    on_disk = any(all(p.is_meta for p in one.parameters()) for one in experts)
    return 6 if on_disk else PROBE_ROWS


def probe_tokens(vocabulary: int, count: int = 4) -> Tensor:
    """Tokens by which a decoder is compared with its model's own forward."""
    return torch.arange(1, count + 1, device="cpu") * 7 % vocabulary


def check_finite(logits: Tensor) -> None:
    """Raises UserError if the largest of a row of the model's own logits is not finite, because of
    damaged weights: there is then no correct text to compare with.
    """
    if not bool(logits.amax(-1).isfinite().all()):
        raise UserError(NOT_FINITE)


def relative_difference(got: Tensor, expected: Tensor) -> float:
    """The norm of the difference, of the expected one's."""
    difference = got.float() - expected.float()
    return float(difference.norm() / expected.float().norm().clamp(min=1e-12))


def rounding_limit(dtype: torch.dtype) -> float:
    """What of a relative difference rounding alone explains, after all layers."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 3e-2


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout for the duration; every module's own mode is restored afterwards."""
    if not model.training:
        yield
        return
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
