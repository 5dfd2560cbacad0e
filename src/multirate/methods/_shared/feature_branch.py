"""A decoder layer that drafts from a token's embedding and the previous token's feature: the target
model's for verified tokens, the layer's own output while drafting (EAGLE).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from multirate.methods._shared.feature_config import FeatureConfig
from multirate.methods._shared.layers import KeysValues, OwnAttention, RMSNorm, SwiGLU
from multirate.methods._shared.objective import shift
from multirate.methods._shared.reduced_head import first_tokens
from multirate.methods._shared.shape import BaseShape
from multirate.runtime.captured import StaticSlots
from multirate.runtime.decoder import Decoder
from multirate.runtime.draft_branch import DraftBranch
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows


class FeatureBranch(nn.Module, ABC):
    """The layer: x = entering(embedded, carried), y = x + attn(read), y + mlp(norm(y)). It starts
    as x alone. taps: layers of the target model whose entering residuals `carried` reads.
    """

    taps: tuple[int, ...] = ()
    draft_tokens: Tensor | None
    """[draft_vocab] int64 ids of the draft head's rows, increasing; None: the whole vocabulary."""

    def __init__(self, config: FeatureConfig, base: BaseShape, inputs: int) -> None:
        super().__init__()
        config.check_base(base)
        self.config, self.base = config, base
        d, own = base.hidden_size, config.layer_shape(base)
        self.attn = OwnAttention(
            d, own.num_heads, own.num_kv_heads, own.head_dim, own.rope_theta, inputs
        )
        self.mlp_norm = RMSNorm(d, own.norm_eps)
        self.mlp = SwiGLU(d, own.intermediate_size)
        nn.init.zeros_(self.attn.o.weight)
        nn.init.zeros_(self.mlp.down.weight)
        self.register_buffer("draft_tokens", first_tokens(config.draft_vocab))

    @abstractmethod
    def carried(self, hidden: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        """What is carried of verified tokens: of their h_L [..., d] or what enters `taps`."""

    @abstractmethod
    def entering(self, embedded: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """[..., d] each → the residual x [..., d], and what attention reads [..., inputs]."""

    @abstractmethod
    def branch(self) -> DraftBranch:
        """What it computes, for decoders that have a form of their own."""

    @abstractmethod
    def logits(self, decoder: Decoder, p: Tensor) -> Tensor:
        """Logits of outputs p [n, d]: float32 [n, V], −inf outside draft_tokens."""

    def forward(
        self, embedded: Tensor, carried: Tensor, earlier: Sequence[KeysValues] = ()
    ) -> tuple[Tensor, KeysValues]:
        """Training pass of draft step len(earlier) + 1 (see ``OwnAttention.forward``). [B, T, d]
        each → same, K/V.
        """
        x, read = self.entering(embedded, carried)
        mixed, keys_values = self.attn(read, earlier)
        y = x + mixed
        return y + self.mlp(self.mlp_norm(y)), keys_values

    def rows(
        self,
        embedded: Tensor,
        carried: Tensor,
        rows: Rows | StaticSlots,
        cache: KVCache | None,
    ) -> Tensor:
        """Decoding: [N, d] each → [N, d]; K/V of every row are written at ``rows.slot``, over a
        ``cache`` that attn.new_cache made (OwnAttention.rows).
        """
        x, read = self.entering(embedded, carried)
        y = x + self.attn.rows(read, rows, cache)
        return y + self.mlp(self.mlp_norm(y))

    def unrolled(self, embedded: Tensor, carried: Tensor) -> list[Tensor]:
        """The outputs [B, T, d] of draft steps 1 … unroll_steps: each carries the output of the one
        before, one position later. carried: of the row itself, true.
        """
        earlier: list[KeysValues] = []
        outputs: list[Tensor] = []
        for _ in range(self.config.unroll_steps):
            out, keys_values = self(embedded, carried, earlier)
            earlier.append(keys_values)
            outputs.append(out)
            carried = shift(out)
        return outputs
