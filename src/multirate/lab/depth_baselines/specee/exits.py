"""SpecEE as a depth policy: candidates, light predictors, and which exits are worth a look."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from multirate.decoding.depth import DepthPolicy, LayerRange, Leaving
from multirate.decoding.session import Session
from multirate.lab.depth_baselines._shared.exit_head import ExitHead
from multirate.lab.depth_baselines.specee.config import SpecEEDecodeConfig
from multirate.lab.depth_baselines.specee.modules import CANDIDATES, LOGIT_UNIT, SpecEE, read_of
from multirate.methods._shared.distillation import Head
from multirate.methods._shared.teacher import head_of
from multirate.runtime.decoder import Decoder
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.native import NativeDecoder
from multirate.runtime.native.packing import Owner

HOT = 4
"""How many exits are checked for every token: the ones where the training data's tokens could leave
first most often.
"""
LAST_EXITS, NEIGHBOURS = 5, 2
"""The ones on either side of each of the last exits are checked as well."""


@dataclass
class _Sequence:
    """What is known of one: the residual [d] that its last token left with, its last exits; of the
    token in the pass: the candidates' places in the head [4] and the model's LM head over them, the
    exits to look at, their probabilities [4] where they were looked at last.
    """

    before: Tensor
    last_exits: deque[int] = field(default_factory=lambda: deque(maxlen=LAST_EXITS))
    places: list[int] = field(default_factory=list)
    candidates: Head | None = None
    hot: frozenset[int] = frozenset()
    probabilities: np.ndarray | None = None


class SpecEEExits(DepthPolicy):
    """A token leaves at the first exit that is looked at where the predictor passes the threshold
    and the head's argmax is one of the four candidates, which it then says.
    """

    def __init__(self, decoder: Decoder, module: SpecEE, settings: SpecEEDecodeConfig) -> None:
        self._decoder, self._threshold = decoder, settings.threshold
        self._head = ExitHead(decoder, module.draft_tokens)
        self._rows = _head_rows(decoder)
        self._propose = _proposer(decoder, module)
        self._predictors = Predictors(module)
        self._every = frozenset(module.exits)
        self._hot = frozenset(module.hot(HOT))
        self._sequences: dict[int, _Sequence] = {}

    def begin(self, session: Session) -> None:
        self.exits, self._sequences = (), {}

    def after_prompt(self, hidden: Tensor, seqs: Sequence[int]) -> None:
        for b, row in zip(seqs, hidden, strict=True):
            self._sequences[b] = _Sequence(row)

    def after_token(self, layers: int, hidden: Tensor, seqs: Sequence[int]) -> None:
        for b, row in zip(seqs, hidden, strict=True):
            self._sequences[b].before = row
            self._sequences[b].last_exits.append(layers)

    def schedule(self, session: Session, seqs: Sequence[int]) -> Sequence[LayerRange] | None:
        if self._threshold is None:
            return None
        decoder, known = self._decoder, [self._sequences[b] for b in seqs]
        ids = torch.tensor(
            [session.sampler.tokens[b][-1] for b in seqs], dtype=torch.int64, device="cpu"
        )
        at = session.cache.lengths
        embedded = decoder.embed(
            ids.to(decoder.info.device), np.array([at[b] for b in seqs], np.int32)
        )
        said = self._propose(read_of(embedded, torch.stack([one.before for one in known])))
        places = decoder.top_tokens(self._head.logits(said), CANDIDATES)
        candidates = self._head.tokens(
            torch.tensor(places, device=decoder.info.device, dtype=torch.int64)
        )
        for one, row, tokens in zip(known, places, candidates, strict=True):
            one.places, one.probabilities = row, None
            one.candidates = self._rows(tokens).in_float32()
            near = {e + i for e in one.last_exits for i in range(-NEIGHBOURS, NEIGHBOURS + 1)}
            one.hot = self._hot | (near & self._every)
        self.exits = tuple(sorted(frozenset().union(*(one.hot for one in known))))
        return None

    def leave(self, exit: int, hidden: Tensor, seqs: Sequence[int]) -> Leaving:
        known = [self._sequences[b] for b in seqs]
        looking = [i for i, one in enumerate(known) if exit in one.hot]
        asking = [i for i in looking if self._passes(exit, hidden[i : i + 1], known[i])]
        rows, full = [False] * len(seqs), None
        if asking:
            logits = self._head.logits(hidden[asking])
            for i, (best,) in zip(asking, self._decoder.top_tokens(logits, 1), strict=True):
                rows[i] = best in known[i].places
            full = self._head.widened(logits)
            if len(asking) < len(seqs):  # the others' logits are not read
                full = full[[asking.index(i) if i in asking else 0 for i in range(len(seqs))]]
        return Leaving(rows, full)

    def _passes(self, exit: int, hidden: Tensor, one: _Sequence) -> bool:
        """Whether the predictor trusts the exit of hidden [1, d]."""
        assert one.candidates is not None and self._threshold is not None
        logits = one.candidates.logits(self._decoder.norm(hidden))[0]
        trust, one.probabilities = self._predictors.trust(
            exit, logits.cpu().numpy(), one.probabilities
        )
        return trust >= self._threshold


class Predictors:
    """The predictors in numpy, in float32 as they were trained: of a few thousand products each,
    torch's own overhead would be most of the time, at every exit that is looked at.
    """

    def __init__(self, module: SpecEE) -> None:
        def array(parameter: Tensor) -> np.ndarray:
            return parameter.detach().float().cpu().numpy()

        self._place = {exit: which for which, exit in enumerate(module.exits)}
        self._weight, self._bias = array(module.weight), array(module.bias)
        self._out, self._out_bias = array(module.out), array(module.out_bias)

    def trust(
        self, exit: int, logits: np.ndarray, before: np.ndarray | None
    ) -> tuple[float, np.ndarray]:
        """The candidates' logits [4] at an exit and their probabilities where they were looked at
        before → the predicted probability, and their probabilities here: `features` and
        `SpecEE.judge`.
        """
        here = np.exp(logits - logits.max())
        here /= here.sum()
        change = np.zeros_like(here) if before is None else here - before
        read = np.concatenate([logits / LOGIT_UNIT, here, change])
        which = self._place[exit]
        inner = np.maximum(self._weight[which] @ read + self._bias[which], 0)
        score = float(inner @ self._out[which] + self._out_bias[which])
        return 1 / (1 + math.exp(-score)) if score > -500 else 0.0, here


def _head_rows(decoder: Decoder) -> Callable[[Tensor], Head]:
    """What makes of a few tokens the model's LM head over them."""
    if isinstance(decoder, NativeDecoder):
        bias = decoder.head_bias
        return lambda tokens: Head(
            decoder.head_rows(tokens), None if bias is None else bias[tokens]
        )
    assert isinstance(decoder, HFDecoder)
    return head_of(decoder.parts).subset


def _proposer(decoder: Decoder, module: SpecEE) -> Callable[[Tensor], Tensor]:
    """[n, 2 d] → what the head reads [n, d], as this decoder runs it fastest."""
    if isinstance(decoder, NativeDecoder):
        return _PackedProposer(decoder, module)
    proposer, dtype = module.proposer.to(decoder.info.device), decoder.info.dtype
    return lambda read: proposer(read).to(dtype)


class _PackedProposer:
    """The proposer in the kernel's form, as exact as the model's own weights."""

    def __init__(self, decoder: NativeDecoder, module: SpecEE) -> None:
        self._decoder, self._owner = decoder, Owner()
        proposer = module.proposer
        self._linear = self._owner.linear(proposer.linear.weight)
        self._down, self._up = self._owner.bottleneck(proposer.down.weight, proposer.up.weight)

    def __call__(self, read: Tensor) -> Tensor:
        product = self._decoder.product
        middle = F.silu(product(self._down, read, None))
        every = product(self._up, middle, None, into=product(self._linear, read, None))
        return every[:, : self._decoder.info.hidden_size]
