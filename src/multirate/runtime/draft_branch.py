"""What a method's drafts are computed from, as weights and shapes that no backend is part of.

A decoder with a faster form than torch modules makes it from these (`Decoder.drafting`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from multirate.runtime.fused import DraftShape, FusedSequences, Lookups
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.noise import Noise
from multirate.runtime.rows import Rows

if TYPE_CHECKING:
    from multirate.runtime.decoder import LayerAdapter

DraftWeights = Literal["int4", "int8", "bf16"]
"""How the native kernel packs weights that only draft. Compared with bf16, int8 reads half the
memory per draft level and int4 a third. Both change which tokens are drafted, but never the text
(lab/notes/weight-formats.md). [ours]
"""
Likeliest = tuple[list[list[int]], list[list[float]]]
"""Of each row some tokens and their probabilities, best first."""


@dataclass(frozen=True)
class Linear:
    """W · RMSNorm(x) + bias."""

    weight: Tensor
    """[outputs, inputs]"""
    norm: Tensor | None = None
    """[inputs]; None: x is not normed."""
    bias: Tensor | None = None


@dataclass(frozen=True)
class BranchLayer:
    """A decoder layer with keys and values of its own: y = x + attention, y + SwiGLU(y)."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    """Base of the rotary embedding."""
    eps: float
    """Epsilon of its norms."""
    mlp: tuple[Tensor, Tensor, Tensor] | None = None
    """gate, up, down; None: attention alone."""
    norm_attention: Tensor | None = None
    """[d] norm of what attention reads; None: none."""
    norm_mlp: Tensor | None = None
    """[d] norm of what the MLP reads; None: none."""
    norm_beside: Tensor | None = None
    """[d] norm of the embedding, which attention then reads beside x; None: it reads x alone."""

    @property
    def intermediate(self) -> int:
        """Width of the MLP."""
        return 0 if self.mlp is None else len(self.mlp[0])


@dataclass(frozen=True)
class BranchHead:
    """What outputs are read with."""

    tokens: Tensor | None = None
    """int64 [draft_vocab] ids of its outputs, increasing; None: the whole vocabulary."""
    weight: Tensor | None = None
    """[draft_vocab, d]; None: the model's."""
    norm: Tensor | None = None
    """[d] before it; None: the model's."""


@dataclass(frozen=True)
class Features:
    """W · (the residuals entering the layers `taps`, side by side), carried of verified tokens."""

    taps: tuple[int, ...]
    weight: Tensor
    """[d, taps · d]"""
    added: bool
    """Whether h_L is added to it."""


@dataclass(frozen=True)
class Agreement:
    """The chance that a row's best token is the model's: sigmoid(out · silu(W n + bias) +
    out_bias), n = the row over its RMS, times the model's final norm.
    """

    weight: Tensor
    bias: Tensor
    out: Tensor
    out_bias: float


@dataclass(frozen=True)
class DraftBranch:
    """A residual beside the model's own: x = embedding + carry(c), layers [0, exit_layer) with
    `adapters`, x = fuse_branch(x) + fuse_carried(c), `layer`, norm_out.

    c is what is carried: of a verified token's predecessor h_L or `features`, of a drafted one's
    the branch's own output.
    """

    exit_layer: int = 0
    adapters: Mapping[int, LayerAdapter] | None = None
    carry: Linear | None = None
    fuse_branch: Linear | None = None
    fuse_carried: Linear | None = None
    layer: BranchLayer | None = None
    norm_in: Tensor | None = None
    """[d] norm of c where that is the layer's x; None: none."""
    norm_out: Tensor | None = None
    features: Features | None = None
    head: BranchHead = field(default_factory=BranchHead)
    agreement: Agreement | None = None
    eps: float = 0.0
    """Epsilon of the norms outside `layer`."""


class PackedHead(ABC):
    """A head that drafts are read with."""

    @abstractmethod
    def top(
        self,
        x: Tensor,
        count: int,
        sharpness: float = 1.0,
        noise: Sequence[Noise] | None = None,
        normed: bool = False,
    ) -> Likeliest:
        """The `count` likeliest tokens by each row of x [n, d] and their probabilities under
        softmax(sharpness · logits). noise[i]: added to the logits of row i. normed: x has passed
        the norm.
        """


class PackedLayer(ABC):
    """A `BranchLayer`. window: how many of the newest tokens a row sees; None: all."""

    window: int | None

    @abstractmethod
    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty one-layer cache."""

    @abstractmethod
    def rows(self, x: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        """x [N, d] → fp32 [N, d]; writes K/V at `rows.slot`."""


class PackedBranch(ABC):
    """A `DraftBranch`. keys_only: as `DraftRunner.keys_only`. window: of its own layer."""

    keys_only: bool = False
    window: int | None

    @property
    @abstractmethod
    def own_cache(self) -> KVCache | None:
        """The own layer's K/V in this generation; None: it has none."""

    @abstractmethod
    def begin(self, cache: KVCache) -> None:
        """A generation over the model's `cache` starts: the own layer's K/V are empty."""

    @abstractmethod
    def carried(self, hidden: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        """What is carried of tokens, [n, d], by their h_L [n, d] and what enters each tap."""

    @abstractmethod
    def step(
        self, ids: list[int], rows: Rows, carried: Tensor | None, fresh: int
    ) -> tuple[Tensor, Tensor]:
        """As `DraftRunner.step`."""

    @abstractmethod
    def top(
        self, p: Tensor, count: int, sharpness: float, noise: Sequence[Noise] | None
    ) -> Likeliest:
        """As `PackedHead.top`, of outputs p [n, d]."""

    @abstractmethod
    def agreement(self, p: Tensor) -> list[float]:
        """`DraftBranch.agreement` of outputs p [n, d]."""

    @abstractmethod
    def fused(self, shape: DraftShape, lookups: Lookups) -> FusedSequences:
        """Whole steps, whose drafts this branch makes."""


class Drafting(ABC):
    """Makes a decoder's own form of what drafts, with weights packed in one way."""

    @abstractmethod
    def linear(self, weight: Tensor) -> PackedLinear:
        """W [outputs, inputs] as a function x [n, inputs] → fp32 [n, outputs or more]."""

    @abstractmethod
    def head(self, head: BranchHead) -> PackedHead: ...

    @abstractmethod
    def layer(self, layer: BranchLayer) -> PackedLayer | None:
        """None: the decoder has no form of this shape."""

    @abstractmethod
    def branch(self, branch: DraftBranch) -> PackedBranch | None:
        """None: as `layer`."""


class PackedLinear(ABC):
    """W · x."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...
