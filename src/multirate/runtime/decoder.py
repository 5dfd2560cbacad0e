"""The abstract decoder that the decoding loops drive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from multirate.runtime.captured import CapturedLevels, CapturedRows
from multirate.runtime.draft_branch import Drafting, DraftWeights
from multirate.runtime.fused import FusedSequences, Lookups
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.noise import Noise, noisy_argmax
from multirate.runtime.rows import Rows
from multirate.runtime.time_split import TimeSplit
from multirate.runtime.transfer import to_device


class NotPlain(str):
    """Why a model of a known family is not packed: the module that is not standard, and the
    reason.
    """


class LayerAdapter(Protocol):
    """Changes one layer for the adapter rows (docs/methods/m2r2.md)."""

    def deltas(self) -> Mapping[str, nn.Module]:
        """Maps site names among "q", "o", "gate", "up", "down", "mlp" to modules f.

        f(input of that linear [..., in]) is added to the linear's output [..., out]; "mlp" is a
        parallel adapter: f(input of the MLP block) is added to the MLP block's output.
        """
        ...


@dataclass(frozen=True)
class DecoderInfo:
    """Sizes and limits of a decoder."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    """The longest context (prompt and new tokens) for which the model's positions are exact; None:
    unlimited.
    """
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...]
    """The sliding window of each layer; None: full attention."""
    num_experts: int = 0
    """0 for a dense model."""
    experts_per_token: int = 0
    tied_head: bool = False
    claimed_positions: int | None = None
    """The model's own limit, if it is above max_positions; else None."""

    @property
    def context(self) -> str:
        """The context limit, as error messages name it."""
        if self.claimed_positions is None:
            return f"the model's context of {self.max_positions} tokens"
        return (
            f"the first {self.max_positions} of the model's {self.claimed_positions} positions: "
            "beyond them its rotary embedding changes for the whole text, which only "
            "transformers' generate supports"
        )


@dataclass(frozen=True)
class VerifiedDraft:
    """What `Decoder.verify_draft` found for a draft of n nodes."""

    path: list[int]
    """The accepted nodes, starting with 0, the last token."""
    tokens: list[int]
    """What is emitted after each of them."""
    hidden: Tensor
    """[n+1, d]: the final residual h_L of every node."""
    best: list[list[int]] | None
    """[n+1][top]: the likeliest tokens after every node, by its logits without noise; None if not
    asked for.
    """


class Decoder(ABC):
    """A decoder-only language model, as the loops see it. All methods run without gradients."""

    info: DecoderInfo
    backend: ClassVar[str] = "hf"
    """Its name in `BACKENDS` (load.py)."""
    runs_the_model = True
    """Whether calls change the model or run its modules, so that its decoders must take turns."""
    unread_bytes = 0
    """How many bytes of the model's weights a plain pass does not read."""

    @property
    def pass_dependent(self) -> str | None:
        """The precision in which a row's result depends on the other rows of its call so much that
        text can change: where two tokens are about equally likely, a pass of another size may
        choose the other one. None: results do not depend on it, or only in the last bits of
        float32.
        """
        return None

    @abstractmethod
    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens (it grows when more are
        written).
        """

    def release_cache(self, cache: KVCache) -> None:  # noqa: B027 - optional
        """Frees `cache`: its memory may serve the next `new_cache`."""

    @abstractmethod
    def embed(self, ids: Tensor, pos: np.ndarray) -> Tensor:
        """Token ids [N] at positions pos [N] → [N, d] as they enter layer 0 (scaled, learned
        positions added).
        """

    @abstractmethod
    def layers(
        self,
        x: Tensor,
        rows: Rows,
        start: int,
        stop: int,
        cache: KVCache,
        adapters: Mapping[int, LayerAdapter] | None = None,
    ) -> Tensor:
        """Runs layers [start, stop) on the N rows: [N, d] → [N, d]; writes K/V of rows with slot >=
        0.

        `adapters[i]` modifies layer i for rows with `rows.accelerated` only.
        """

    def first_layers(self, ids: Sequence[int], rows: Rows, stop: int, cache: KVCache) -> Tensor:
        """The rows' tokens, embedded, and layers [0, stop): as `embed` and `layers` → [N, d]."""
        x = self.embed(to_device(np.asarray(ids, np.int64), self.info.device), rows.pos)
        return self.layers(x, rows, 0, stop, cache)

    def layers_with_taps(
        self, x: Tensor, rows: Rows, start: int, stop: int, cache: KVCache, taps: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """`layers`, and the residuals [N, d] entering each layer of `taps`, from start to stop
        (`stop`: the result).
        """
        found: dict[int, Tensor] = {}
        for tap in sorted(taps):
            if not start <= tap <= stop:
                raise ValueError(f"tap {tap} lies outside layers {start}..{stop}")
            x = self.layers(x, rows, max([start, *found]), tap, cache)
            found[tap] = x
        return self.layers(x, rows, max([start, *found]), stop, cache), found

    @abstractmethod
    def fill_kv(self, rows: Rows, hidden: Tensor, start: int, stop: int, cache: KVCache) -> None:
        """Writes the K/V of the N rows for layers [start, stop) as if `hidden` [N, d] entered each
        of them.

        For rows that leave early, so that later ones find K/V in every layer. Runs only the layer's
        own input norm, key and value projections, key norm and rotary embedding, with the rounding
        of `layers`.
        """

    @abstractmethod
    def norm(self, x: Tensor) -> Tensor:
        """The final norm: [N, d] → [N, d]."""

    @abstractmethod
    def unembed(self, normed: Tensor) -> Tensor:
        """LM head, scaling and soft-cap of normed states: [N, d] → float32 [N, V]."""

    def logits(self, x: Tensor) -> Tensor:
        """Final norm, LM head, scaling and soft-cap: [N, d] → float32 [N, V]."""
        return self.unembed(self.norm(x))

    def top_tokens(self, logits: Tensor, count: int) -> list[list[int]]:
        """The `count` likeliest tokens of each row of logits [N, V], the likeliest first."""
        return self.likeliest(logits, count)[0]

    def likeliest(self, logits: Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """The same `count` tokens of each row of logits [N, V], and their probabilities."""
        top = logits.topk(count, dim=-1)
        probabilities = torch.exp(top.values - logits.logsumexp(-1, keepdim=True))
        return top.indices.tolist(), probabilities.tolist()

    def next_tokens(
        self,
        rows: Rows,
        cache: KVCache,
        ids: Sequence[int] | None = None,
        x: Tensor | None = None,
        start: int = 0,
        noise: Sequence[Noise] | None = None,
    ) -> tuple[Tensor, list[int]]:
        """One pass to the next tokens: the rows' ``ids``, or residuals ``x`` [N, d] entering layer
        ``start`` → h_L [N, d] and each row's argmax, with noise[i] added to the logits of row i if
        given. Equals ``embed``, ``layers``, ``logits`` and ``noisy_argmax``, in one call if that is
        faster. Raises UserError as ``noisy_argmax`` does.
        """
        if x is None:
            x = self.embed(torch.as_tensor(ids, device=self.info.device), rows.pos)
        hidden = self.layers(x, rows, start, self.info.num_layers, cache)
        logits = self.logits(hidden)
        chosen = argmax_rows(logits) if noise is None else self.noisy_argmax(logits, noise)
        return hidden, chosen

    @property
    def threads(self) -> int:
        """How many processor threads the decoder uses at the moment."""
        return torch.get_num_threads()

    def spent(self) -> TimeSplit | None:
        """Time that its calls have taken so far, without the prompts' passes; None if it does not
        measure it.
        """
        return None

    def verify_draft(
        self,
        cache: KVCache,
        seq: int,
        ids: Sequence[int],
        parents: Sequence[int],
        noise: Noise | None = None,
        top: int = 0,
        x: Tensor | None = None,
        start: int = 0,
    ) -> VerifiedDraft | None:
        """Verifies a draft of sequence ``seq`` in one call, if possible. None: it is not, and
        nothing has changed.

        ids: [n+1], the last token, which is not in the cache yet, and the nodes.
        parents: [n], as a draft's.
        noise: of the token after the last one; None: tokens are the argmax.
        top: how many of the likeliest tokens after each node to return.
        x: the residuals [n+1, d] entering layer ``start``, if the layers below have run; None: the
            tokens are embedded.

        Every accepted node is its parent's first child with the token that the model chooses there.
        The K/V of the accepted nodes go to the slots after the committed ones, uncommitted. Raises
        UserError as ``noisy_argmax`` does.
        """
        return None

    def captured_rows(self) -> CapturedRows | None:
        """Captures functions of a few rows that run beside the model's layers; None: the decoder
        captures nothing, and they just run.
        """
        return None

    def captured_levels(self) -> CapturedLevels | None:
        """The same of whole draft levels."""
        return None

    def drafting(self, weights: DraftWeights) -> Drafting | None:
        """This decoder's own form of what drafts, packed as `weights` says; None: it has none, and
        torch modules run.
        """
        return None

    def text_steps(self, nodes: int, lookups: Lookups) -> FusedSequences | None:
        """Whole steps in one call whose drafts, of up to `nodes` tokens, are looked up; None: the
        decoder has no such steps.
        """
        return None

    def noisy_argmax(self, logits: Tensor, noise: Sequence[Noise]) -> list[int]:
        """``noise.noisy_argmax``, or a faster equivalent."""
        return noisy_argmax(logits, noise)


def argmax_rows(logits: Tensor) -> list[int]:
    """The argmax of each row of logits [n, V]."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # torch would wake its thread pool for a dozen rows, whose waiting threads then starve the
        # native kernel's
        tokens: list[int] = logits.numpy().argmax(axis=-1).tolist()
        return tokens
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    return chosen
