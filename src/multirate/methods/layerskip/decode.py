"""Plain early exit as a drafter [Elhoushi et al. 2024]: layers [0, E) and the shared head draft,
[E, L) verify.

Shallow K/V are written once, while drafting, and are the verified ones: the residual entering layer
E is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.drafter import Draft, Drafter, DraftRequest, Traits
from multirate.errors import UserError
from multirate.methods._shared.config import MethodConfig
from multirate.runtime.decoder import Decoder, argmax_rows
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows


@dataclass(frozen=True)
class LayerSkipConfig(MethodConfig):
    METHOD: ClassVar[str] = "layerskip"

    exit_layer: int = 0
    """The number of first layers that draft. 0: a quarter of the model's layers, at least one."""
    tokens: int = 6
    """Maximum length of a draft."""
    confidence: float = 0.4
    """Drafting stops before a token whose top-1 probability at the exit is below this; 0 never
    stops.
    """

    def check(self) -> None:
        super().check()
        for name, least in (("exit_layer", 0), ("tokens", 1)):
            accepted = f"a whole number of at least {least}"
            self.require(getattr(self, name) >= least, name, accepted)
        self.require(0 <= self.confidence <= 1, "confidence", "a number from 0 to 1")

    def exit_of(self, num_layers: int) -> int:
        """The exit layer in a model of `num_layers`. Raises UserError if no deeper layer is left to
        verify with.
        """
        exit_layer = self.exit_layer or max(1, num_layers // 4)
        if exit_layer >= num_layers:
            raise UserError(
                f"layerskip's exit_layer is {exit_layer}; accepted for this model: "
                f"1..{num_layers - 1}"
            )
        return exit_layer


class LayerSkipDrafter(Drafter):
    """Drafts chains level by level, all sequences in one call; a sequence drops out when its
    confidence is low.
    """

    def __init__(self, decoder: Decoder, config: LayerSkipConfig) -> None:
        self._decoder, self.config = decoder, config
        self._start = config.exit_of(decoder.info.num_layers)
        self.traits = Traits(start=self._start, max_nodes=config.tokens)
        self._cache: KVCache | None = None

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        """Takes the cache that shallow K/V are written to."""
        self._cache = cache

    def usable(self, cache: KVCache, length: int) -> int:
        return length  # it has no state but the target's cache

    def draft(self, request: DraftRequest) -> list[Draft]:
        """Tokens are those that the model would take by these logits, with the noise
        that it will add to its own.
        """
        seqs, sampler = request.seqs, request.sampler
        depths = [min(limit, self.config.tokens) for limit in request.limits]
        count = len(seqs)
        tokens: list[list[int]] = [[] for _ in seqs]
        hidden: list[list[Tensor]] = [[] for _ in seqs]
        live, entering = list(range(count)), request.last_tokens
        for depth in range(1, max(depths) + 2):
            x = self._shallow([seqs[i] for i in live], entering, depth - 1)  # [n, d] at the exit
            for row, i in enumerate(live):
                hidden[i].append(x[row : row + 1])
            wanting = [row for row, i in enumerate(live) if depth <= depths[i]]
            if not wanting:
                break
            logits = sampler.perturbed(
                self._decoder.logits(x if len(wanting) == len(live) else x[wanting]),
                [seqs[live[row]] for row in wanting],
                [tokens[live[row]] for row in wanting],
            )
            sure = self._confidence(logits)
            going = [k for k, confidence in enumerate(sure) if confidence >= self.config.confidence]
            if not going:
                break
            live = [live[wanting[k]] for k in going]
            if len(going) < len(wanting):
                logits = logits[going]
            entering = argmax_rows(logits)
            for token, i in zip(entering, live, strict=True):
                tokens[i].append(token)
        return [Draft.chain(tokens[i], torch.cat(hidden[i])) for i in range(count)]

    def _shallow(self, seqs: list[int], tokens: list[int], depth: int) -> Tensor:
        """Layers [0, E) on one row per sequence, `depth` slots after its committed ones → [n,
        d].
        """
        assert self._cache is not None
        slot = np.array([self._cache.lengths[b] + depth for b in seqs], dtype=np.int32)
        rows = Rows(
            np.array(seqs, dtype=np.int32),
            slot,
            slot,
            slot + 1,
            np.zeros(len(seqs), dtype=np.int64),
        )
        return self._decoder.first_layers(tokens, rows, self._start, self._cache)

    def _confidence(self, logits: Tensor) -> list[float]:
        """Top-1 probability of each row of logits [n, V]; not computed where nothing depends on
        it.
        """
        if self.config.confidence == 0:
            return [1.0] * len(logits)
        return torch.exp(logits.amax(dim=-1) - torch.logsumexp(logits, dim=-1)).tolist()
