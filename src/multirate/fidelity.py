"""What quantising a model costs: how a quantised model reads fixed texts, and how the full model
does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from multirate.decoding.prefill import LOGITS_AT_ONCE, read_in_pieces
from multirate.runtime.decoder import Decoder

TEXTS = Path(__file__).parent / "fidelity_texts"
"""English texts of six kinds, written for this package."""
_LONGEST = 512  # tokens of a text that are read


class Reader(Protocol):
    """A model that reads a text."""

    def logits(self, ids: Tensor) -> Tensor:
        """The logits [n, vocabulary] after each of the tokens `ids`, int64 [n]."""


@dataclass(frozen=True)
class ModelReader:
    """A causal LM of transformers."""

    model: Any

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """As Reader has it."""
        found: Tensor = self.model(ids[None].to(self.model.device)).logits[0]
        return found.float().cpu()


@dataclass(frozen=True)
class DecoderReader:
    """A decoder of this package, on any backend."""

    decoder: Decoder

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """As Reader has it."""
        cache = self.decoder.new_cache(1, len(ids))
        last = self.decoder.info.num_layers
        found = [
            self.decoder.logits(rows).float().cpu()
            for _, states in read_in_pieces(self.decoder, cache, {0: ids.tolist()})
            for rows in states[last].split(LOGITS_AT_ONCE)
        ]
        self.decoder.release_cache(cache)
        return torch.cat(found)


@dataclass(frozen=True)
class Fidelity:
    """How a quantised model compares with the full one, over all tokens but each text's first."""

    positions: int
    """How many tokens were predicted."""
    full_perplexity: float
    perplexity: float
    """Of the quantised model."""
    agreement: float
    """The share of positions at which both have the same most likely token."""
    divergence: float
    """Mean KL divergence of the quantised model's distribution from the full one's, in nats."""

    def __str__(self) -> str:
        change = 100 * (self.perplexity / self.full_perplexity - 1)
        return (
            f"perplexity {self.full_perplexity:.2f} → {self.perplexity:.2f} ({change:+.1f}%), the "
            f"same best token at {100 * self.agreement:.1f}% of {self.positions:,} positions"
        )


def fidelity(full: Reader, quantised: Reader, texts: Sequence[Sequence[int]]) -> Fidelity:
    """Compares two models on texts given as token ids. Every token but the first of a text is
    predicted from those before it.
    """
    positions, same = 0, 0
    surprise, own_surprise, divergence = 0.0, 0.0, 0.0
    for text in texts:
        ids = torch.tensor(text, dtype=torch.int64, device="cpu")
        if len(ids) < 2:
            continue
        expected, found = (
            reader.logits(ids[:-1]).float().log_softmax(-1) for reader in (full, quantised)
        )
        surprise -= _of_tokens(expected, ids[1:])
        own_surprise -= _of_tokens(found, ids[1:])
        divergence += (expected.exp() * (expected - found)).sum(-1).double().sum().item()
        same += int((expected.argmax(-1) == found.argmax(-1)).sum())
        positions += len(ids) - 1
    if not positions:
        raise ValueError("no text has two tokens")
    return Fidelity(
        positions,
        math.exp(surprise / positions),
        math.exp(own_surprise / positions),
        same / positions,
        divergence / positions,
    )


def fixed_texts(tokenizer: Any, longest: int | None = None) -> list[list[int]]:
    """The package's texts as token ids, cut to the model's `longest` text."""
    most = _LONGEST if longest is None else min(longest, _LONGEST)
    files = sorted(TEXTS.glob("*.txt"))
    return [tokenizer(file.read_text(encoding="utf-8"))["input_ids"][:most] for file in files]


def _of_tokens(log_probabilities: Tensor, ids: Tensor) -> float:
    each = log_probabilities.gather(-1, ids[:, None])
    return float(each.double().sum())
