"""From logits to those that tokens are chosen by: one pipeline for drafts and target.

Order and semantics match transformers' logits processors: repetition penalty, temperature, top-k,
top-p, min-p. A method that drafts with another pipeline is still lossless, because the target
chooses every token, but fewer of its drafts are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from multirate.errors import MOST_SEED, UserError

_NUCLEUS_CANDIDATES = (
    512  # sorting these first spares sorting the whole vocabulary for almost every row
)


Processor = Callable[[Tensor, Tensor], Tensor]
"""A logits processor of transformers: token ids [1, T] and scores [1, V] → scores [1, V]."""


@dataclass(frozen=True)
class SamplingSettings:
    """How the next token is chosen. The default is greedy decoding.

    Raises UserError naming the field, its value and what is accepted.
    """

    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k largest logits, including ties of the k-th; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability, in (0, 1]; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less probable than min_p times the most probable one, in [0, 1]; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the negative ones, of tokens that are already in
    the prompt or the output; 1 changes nothing. Greedy decoding uses it as well.
    """
    seed: int | None = None
    """The same seed gives the same tokens. Each sequence has its own random numbers, which depend
    on its place in the batch. None takes a seed from torch's global generator, so
    `torch.manual_seed` controls it.
    """
    processors: Callable[[int], Sequence[Processor]] | None = None
    """Further changes to the logits, after the repetition penalty. processors(n) returns them for a
    prompt of n tokens.
    """
    forced: Callable[[Sequence[int]], Sequence[int]] | None = None
    """forced(tokens) returns what must follow these tokens of prompt and answer, as far as that is
    known: drafts for steps that verify drafts. Processors decide what is allowed.
    """

    def __post_init__(self) -> None:
        _require_number(
            "temperature",
            self.temperature,
            lambda v: v >= 0,
            "a number of at least 0 (0 is greedy)",
        )
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise UserError(
                f"top_k is {self.top_k!r}; accepted: a whole number of at least 0 (0 keeps all "
                "tokens)"
            )
        _require_number("top_p", self.top_p, lambda v: 0 < v <= 1, "a number above 0 and at most 1")
        _require_number("min_p", self.min_p, lambda v: 0 <= v <= 1, "a number from 0 to 1")
        _require_number(
            "repetition_penalty", self.repetition_penalty, lambda v: v > 0, "a number above 0"
        )
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if self.seed is not None and not (whole and 0 <= self.seed <= MOST_SEED):
            raise UserError(
                f"seed is {self.seed!r}; accepted: a whole number from 0 to {MOST_SEED}, or none"
            )

    @property
    def greedy(self) -> bool:
        """Whether to take the most probable token instead of drawing one."""
        return self.temperature == 0

    @property
    def drops_tokens(self) -> bool:
        """Whether top-k, top-p or min-p may exclude tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def uses_context(self) -> bool:
        """Whether the distribution depends on the tokens so far in other ways than through the
        model.
        """
        return self.repetition_penalty != 1 or self.processors is not None


def _require_number(name: str, value: object, accepts: object, accepted: str) -> None:
    number = not isinstance(value, bool) and isinstance(value, (int, float))
    try:
        number = number and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # a whole number beyond any float
        number = False
    if not number or not accepts(value):  # type: ignore[operator]
        raise UserError(f"{name} is {value!r}; accepted: {accepted}")


def penalise(logits: Tensor, penalty: float, contexts: Sequence[Sequence[int]]) -> Tensor:
    """Repetition penalty: logits [n, V] and, for each row, the token ids that have occurred → [n,
    V] (a copy).
    """
    vocab = logits.shape[-1]
    counts = [len(context) for context in contexts]
    row = np.repeat(np.arange(len(counts)), counts)
    token = np.fromiter(
        (t for context in contexts for t in context), dtype=np.int64, count=int(sum(counts))
    )
    inside = (
        token < vocab
    )  # an embedding may be larger than the head: such ids can never be generated
    seen = torch.zeros(logits.shape, dtype=torch.bool, device="cpu")
    seen[torch.from_numpy(row[inside]), torch.from_numpy(token[inside])] = True
    seen = seen.to(logits.device)
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def adjusted(
    logits: Tensor,
    settings: SamplingSettings,
    contexts: Sequence[Sequence[int]] | None,
    prompts: Sequence[int] | None = None,
) -> Tensor:
    """logits [n, V] after everything that depends on the tokens before each row: the repetition
    penalty and the processors. prompts: how many of these tokens belong to the prompt (default:
    one).
    """
    if not settings.uses_context:
        return logits
    contexts = _needed(contexts, logits)
    if settings.repetition_penalty != 1:
        logits = penalise(logits, settings.repetition_penalty, contexts)
    if settings.processors is None:
        return logits
    rows = []
    for scores, context, prompt in zip(
        logits, contexts, prompts or [1] * len(contexts), strict=True
    ):
        ids = torch.tensor([context], dtype=torch.int64, device=logits.device)
        scores = scores[None]
        for processor in settings.processors(prompt):
            scores = processor(ids, scores)
        rows.append(scores)
    return torch.cat(rows)


def allowed(
    logits: Tensor,
    settings: SamplingSettings,
    contexts: Sequence[Sequence[int]] | None = None,
    prompts: Sequence[int] | None = None,
) -> Tensor:
    """logits [n, V] after the repetition penalty and the processors, with −inf for the tokens that
    top-k, top-p and min-p drop → float32 [n, V]. The temperature counts in choosing these tokens,
    but the logits are not divided by it. `settings` must not be greedy.
    """
    scores = adjusted(logits.float(), settings, contexts, prompts)
    if 0 < settings.top_k < scores.shape[-1]:
        least_kept = torch.topk(scores, settings.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least_kept, -torch.inf)
    if settings.top_p < 1:
        dropped = _outside_nucleus(scores / settings.temperature, settings.top_p)
        scores = scores.masked_fill(dropped, -torch.inf)
    if settings.min_p > 0:
        # p < min_p · max p, without the sum; the most probable token passes, as min_p is at most 1
        least = scores.amax(dim=-1, keepdim=True) + settings.temperature * math.log(settings.min_p)
        scores = scores.masked_fill(scores < least, -torch.inf)
    return scores


def _outside_nucleus(scores: Tensor, top_p: float) -> Tensor:
    """top-p: a token stays iff those ranked above it hold less than top_p. scores [n, V] → which
    are dropped, bool [n, V].
    """
    vocab = scores.shape[-1]
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    ranked, order = torch.topk(scores, min(_NUCLEUS_CANDIDATES, vocab), dim=-1)
    above = torch.cumsum(torch.exp(ranked - total), dim=-1)
    if ranked.shape[-1] < vocab and bool((above[:, -1] < top_p).any()):
        ranked, order = torch.sort(scores, dim=-1, descending=True)
        above = torch.cumsum(torch.exp(ranked - total), dim=-1)
    dropped = torch.zeros_like(ranked, dtype=torch.bool)
    dropped[:, 1:] = above[:, :-1] >= top_p
    return torch.ones_like(scores, dtype=torch.bool).scatter_(-1, order, dropped)


def _needed(contexts: Sequence[Sequence[int]] | None, logits: Tensor) -> Sequence[Sequence[int]]:
    if contexts is None or len(contexts) != logits.shape[0]:
        raise ValueError("a repetition penalty needs the context of every row of logits")
    return contexts
