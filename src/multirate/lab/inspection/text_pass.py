"""One pass over a text: what the residuals of its answer do in every layer, and what the head would
say of them there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from multirate.lab.inspection import residuals as measures
from multirate.methods._shared.branch_tracing import BranchTracer, Interval
from multirate.runtime.decoder import Decoder
from multirate.runtime.rows import Rows
from multirate.torch_modes import own_modes

CHUNK = 64
"""Tokens whose residuals of all layers are in memory at once."""
CANDIDATES = 5


@dataclass(frozen=True)
class Said:
    """What the head says of one token's residual: the likeliest next tokens and their
    probabilities, and what the method judges them by.
    """

    tokens: list[int]
    probabilities: list[float]
    scores: dict[str, float] = field(default_factory=dict)


@dataclass
class IntervalValues:
    """The accelerated stream from layer `start` to `gate` over n tokens. alignment
    [gate − start + 1, n] and agrees (bool) are of the states the stream passes, read_alignment [n]
    and read_agrees [n] of what the head reads at the gate; said [n].
    """

    start: int
    gate: int
    alignment: np.ndarray
    agrees: np.ndarray
    read_alignment: np.ndarray
    read_agrees: np.ndarray
    said: list[Said]


@dataclass
class TextValues:
    """Of the n rows after which the answer's tokens were chosen; layers 1..L where nothing else is
    said.

    velocity, residual_direction [L, n]; change_direction [L − 1, n], from layer 2 on; alignment
    [L + 1, n], from the embedding on; agrees [L, n] bool: whether the head's first choice after a
    layer is the one after all layers. said [n]: after all layers. intervals: the accelerated
    stream's, empty without one.
    """

    velocity: np.ndarray
    residual_direction: np.ndarray
    change_direction: np.ndarray
    alignment: np.ndarray
    agrees: np.ndarray
    said: list[Said]
    intervals: list[IntervalValues]

    def first_agreeing_layers(self) -> list[int]:
        """For each row the least number of layers after which the head says what it says after
        all.
        """
        return (self.agrees.argmax(axis=0) + 1).tolist()

    def first_agreeing_gates(self) -> list[int | None]:
        """For each row the first gate where the accelerated stream says what the model says; None:
        at no gate.
        """
        count = self.agrees.shape[1]
        found: list[int | None] = [None] * count
        for interval in reversed(self.intervals):
            for row in range(count):
                if interval.read_agrees[row]:
                    found[row] = interval.gate
        return found


V = TypeVar("V", TextValues, IntervalValues)


@own_modes()
def read_text(
    decoder: Decoder,
    prompt: Sequence[int],
    answer: Sequence[int],
    tracer: BranchTracer | None = None,
    progress: Callable[[int], None] | None = None,
) -> TextValues:
    """Reads prompt and answer, a chunk at a time. progress(answer tokens so far).

    prompt and answer have at least one token each.
    """
    layers = decoder.info.num_layers
    text = [*prompt, *answer[:-1]]
    cache = decoder.new_cache(1, len(text))
    if tracer is not None:
        tracer.begin(cache)
    parts: list[TextValues] = []
    first = len(prompt) - 1
    for start in range(0, len(text), CHUNK):
        ids = text[start : start + CHUNK]
        rows = Rows.causal(0, start, len(ids))
        x = decoder.embed(
            torch.tensor(ids, device=decoder.info.device, dtype=torch.int64), rows.pos
        )
        last, found = decoder.layers_with_taps(x, rows, 0, layers, cache, range(1, layers))
        cache.commit(0, len(ids))
        states = [x, *(found[layer] for layer in range(1, layers)), last]
        intervals = [] if tracer is None else tracer.trace(ids, start, states)
        wanted = slice(max(0, first - start), None)
        if start + len(ids) > first:
            parts.append(_values(decoder, states, intervals, wanted))
            if progress is not None:
                progress(sum(part.agrees.shape[1] for part in parts))
    decoder.release_cache(cache)
    return join(parts)


def join(parts: Sequence[TextValues]) -> TextValues:
    """Several texts' or chunks' rows, one after the other."""
    intervals = zip(*(part.intervals for part in parts), strict=True)
    return replace(_side_by_side(parts), intervals=[_side_by_side(each) for each in intervals])


def _side_by_side(parts: Sequence[V]) -> V:
    """The first, with the arrays and lists of all of them."""
    joined: dict[str, Any] = {}
    for each in fields(parts[0]):
        values = [getattr(part, each.name) for part in parts]
        if isinstance(values[0], np.ndarray):
            joined[each.name] = np.concatenate(values, axis=-1)
        elif isinstance(values[0], list):
            joined[each.name] = [one for value in values for one in value]
    return replace(parts[0], **joined)


def _values(
    decoder: Decoder, states: list[Tensor], intervals: list[Interval], wanted: slice
) -> TextValues:
    states = [state[wanted] for state in states]
    final = states[-1]
    logits = decoder.logits(final)
    target = logits.argmax(dim=-1)
    all_agree = np.ones(len(target), np.bool_)
    return TextValues(
        measures.velocity(states).cpu().numpy(),
        measures.residual_direction(states).cpu().numpy(),
        measures.change_direction(states).cpu().numpy(),
        measures.alignment(states, final).cpu().numpy(),
        np.stack([*(_agrees(decoder, state, target) for state in states[1:-1]), all_agree]),
        _said(logits, {}),
        [_interval_values(decoder, one, wanted, final, target) for one in intervals],
    )


def _interval_values(
    decoder: Decoder, interval: Interval, wanted: slice, final: Tensor, target: Tensor
) -> IntervalValues:
    states = [state[wanted] for state in interval.states]
    logits = interval.logits[wanted]
    return IntervalValues(
        interval.start,
        interval.gate,
        measures.alignment(states, final).cpu().numpy(),
        np.stack([_agrees(decoder, state, target) for state in states]),
        measures.alignment([interval.read[wanted]], final)[0].cpu().numpy(),
        (logits.argmax(dim=-1) == target).cpu().numpy(),
        _said(logits, {name: values[wanted] for name, values in interval.scores.items()}),
    )


def _agrees(decoder: Decoder, state: Tensor, target: Tensor) -> np.ndarray:
    agrees: np.ndarray = (decoder.logits(state).argmax(dim=-1) == target).cpu().numpy()
    return agrees


def _said(logits: Tensor, scores: dict[str, list[float]]) -> list[Said]:
    """Of every row of logits [n, V]."""
    best, ids = torch.softmax(logits, dim=-1).topk(min(CANDIDATES, logits.shape[-1]), dim=-1)
    return [
        Said(tokens, probabilities, {name: values[row] for name, values in scores.items()})
        for row, (tokens, probabilities) in enumerate(zip(ids.tolist(), best.tolist(), strict=True))
    ]
