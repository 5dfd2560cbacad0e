"""A reduced draft head: drafts choose among the tokens that answers use most. [ours]

With a vocabulary of 49,152 the head is most of what a small model's draft reads, and most of its
training computation. A token outside is never drafted, but the model itself can still choose it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 32000
"""EAGLE-3's, of 128,256; smaller vocabularies keep the same share, a quarter."""


DEFAULT_IN_WORDS = "a quarter of the vocabulary, at most 32,000"


def default_draft_vocab(vocab_size: int) -> int | None:
    """The size of a draft head that the user did not choose; None: the whole vocabulary."""
    return min(_LARGEST, vocab_size // 4 // 64 * 64) or None


def first_tokens(count: int | None) -> Tensor | None:
    """The buffer `draft_tokens` of modules whose config has `draft_vocab` = count, before training
    chooses (training/loop.py) or a checkpoint fills it: int64 [count], increasing; None: all.
    """
    return None if count is None else torch.arange(count, device="cpu")


def spread_over(draft_tokens: Tensor | None, said: Tensor, vocab_size: int) -> Tensor:
    """A reduced head's logits [n, draft_vocab] → [n, V], −inf outside draft_tokens; None: as they
    are.
    """
    if draft_tokens is None:
        return said
    full = torch.full((len(said), vocab_size), -torch.inf, device=said.device, dtype=torch.float32)
    full[:, draft_tokens.to(said.device)] = said
    return full


def limited_to(draft_tokens: Tensor | None, full: Tensor) -> Tensor:
    """Logits [n, V] with −inf outside a reduced draft head's draft_tokens; None: as they are."""
    if draft_tokens is None:
        return full
    return spread_over(draft_tokens, full[:, draft_tokens], full.shape[-1])
