"""Small examples of what methods may be: each as short as it can be, on a real decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multirate.decoding.depth import DepthPolicy, LayerRange, Leaving
from multirate.decoding.sampler import Sampler
from multirate.decoding.session import Session
from multirate.decoding.speculate.drafter import Draft, Drafter, DraftRequest, Traits, Verified
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows

from .helpers import path_tokens


class TwoModelDrafter(Drafter):
    """A second, smaller model drafts chains; it has a cache of its own, which follows the
    text's.
    """

    def __init__(self, draft_model: Decoder, length: int = 3) -> None:
        self.draft_model, self.traits = draft_model, Traits(max_nodes=length)

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        self.own = self.draft_model.new_cache(cache.batch, cache.capacity)

    def draft(self, request: DraftRequest) -> list[Draft]:
        drafts = []
        for b, limit in request.pairs:
            text = request.sampler.tokens[b]
            drafted: list[int] = []
            # rejected tokens lie behind the committed ones and are written over
            fresh = text[self.own.lengths[b] :]
            for depth in range(min(limit, self.traits.max_nodes)):
                rows = Rows.causal(b, self.own.lengths[b] + depth, len(fresh))
                model, info = self.draft_model, self.draft_model.info
                hidden = model.embed(torch.tensor(fresh, device=info.device), rows.pos)
                hidden = model.layers(hidden, rows, 0, info.num_layers, self.own)
                if depth == 0:
                    self.own.commit(b, len(fresh) - 1)
                logits = model.logits(hidden[-1:])
                fresh = request.sampler.choose(logits, [b], [drafted])
                drafted = [*drafted, *fresh]
            drafts.append(Draft.chain(drafted))
        return drafts

    def accept(self, seq: int, verified: Verified) -> None:
        # the draft model has read all accepted nodes but the deepest, if that is the draft's last
        read = min(
            len(verified.path), self.traits.max_nodes, self.own.capacity - self.own.lengths[seq]
        )
        self.own.commit(seq, min(read, len(verified.hidden) - 1))


class HeadsDrafter(Drafter):
    """Several heads read the target's last state; head k guesses the token k + 1 places ahead, as
    Medusa's do.

    The tree: the first head's `width` best tokens, and below the best one the other heads' best.
    """

    def __init__(self, decoder: Decoder, heads: int = 3, width: int = 2) -> None:
        torch.manual_seed(5)
        d = decoder.info.hidden_size
        self.decoder, self.width = decoder, width
        self.blocks = [torch.randn(d, d) * 0.1 / d**0.5 for _ in range(heads)]
        self.states: dict[int, Tensor] = {}

    def prefill(
        self,
        seqs: Sequence[int],
        prompts: Sequence[Sequence[int]],
        hidden_final: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        self.states = {b: hidden[-1] for b, hidden in zip(seqs, hidden_final, strict=True)}

    def draft(self, request: DraftRequest) -> list[Draft]:
        return [self._tree(self.states[b]) for b in request.seqs]

    def _tree(self, state: Tensor) -> Draft:
        normed = self.decoder.norm(state[None])
        guesses = torch.cat(
            [normed + torch.nn.functional.silu(normed @ block) for block in self.blocks]
        )
        best = self.decoder.top_tokens(self.decoder.unembed(guesses), self.width)
        tokens, parents = list(best[0]), [0] * self.width
        at = 1
        for guess in best[1:]:
            tokens.append(guess[0])
            parents.append(at)
            at = len(tokens)
        return Draft(tokens, parents)

    def accept(self, seq: int, verified: Verified) -> None:
        self.states[seq] = verified.accepted[-1]


class TableDrafter(Drafter):
    """After each token the target's best successors, seen wherever a token was verified: accepted
    or not.

    Token recycling's idea. It also looks at the residuals of rejected rows and at a tap, and checks
    them.
    """

    def __init__(self, decoder: Decoder, tap: int = 1) -> None:
        self.decoder, self.tap = decoder, tap
        self.traits = Traits(top=2, taps=(tap,))
        self.next: dict[int, list[int]] = {}
        self.drafts: dict[int, tuple[int, Draft]] = {}
        self.rejected: list[
            tuple[list[int], Tensor, Tensor]
        ] = []  # text up to a rejected node; its h_L and tap
        self.tapped: dict[int, list[Tensor]] = {}  # of the committed tokens

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        self.sampler = sampler

    def prefill(
        self,
        seqs: Sequence[int],
        prompts: Sequence[Sequence[int]],
        hidden_final: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        self.tapped = {b: [states[self.tap]] for b, states in zip(seqs, taps, strict=True)}

    def draft(self, request: DraftRequest) -> list[Draft]:
        self.before = {b: list(request.sampler.tokens[b]) for b in request.seqs}
        return [self._tree(b, text[-1]) for b, text in self.before.items()]

    def _tree(self, seq: int, last: int) -> Draft:
        tokens, parents, level = [], [], [(0, last)]
        for _ in range(2):
            below = []
            for node, token in level:
                for successor in self.next.get(token, []):
                    tokens.append(successor)
                    parents.append(node)
                    below.append((len(tokens), successor))
            level = below
        self.drafts[seq] = last, Draft(tokens, parents)
        return self.drafts[seq][1]

    def accept(self, seq: int, verified: Verified) -> None:
        last, draft = self.drafts[seq]
        count = len(verified.hidden)  # the step may have cut the draft
        assert verified.top is not None and len(verified.top) == count
        nodes = [last, *draft.tokens[: count - 1]]
        for token, best in zip(nodes, verified.top, strict=True):
            self.next[token] = best
        tapped = verified.taps[self.tap]
        assert len(tapped) == count
        self.tapped[seq].append(verified.of_path(tapped))
        paths = path_tokens(draft)
        for node in set(range(count)) - set(verified.path):
            text = [*self.before[seq], *paths[node]]
            self.rejected.append((text, verified.hidden[node], tapped[node]))


class RandomDepth(DepthPolicy):
    """Leaves where a die says."""

    def __init__(self, exits: tuple[int, ...], seed: int, chance: float = 0.5) -> None:
        self.exits, self.chance, self.rng = exits, chance, np.random.default_rng(seed)

    def leave(self, exit: int, hidden: Tensor, seqs: Sequence[int]) -> Leaving:
        return Leaving((self.rng.random(len(seqs)) < self.chance).tolist())


class ConfidentDepth(DepthPolicy):
    """Leaves where the exit's best token has at least this probability [CALM's softmax measure, in
    short].
    """

    def __init__(self, decoder: Decoder, exits: tuple[int, ...], threshold: float) -> None:
        self.decoder, self.exits, self.threshold = decoder, exits, threshold

    def leave(self, exit: int, hidden: Tensor, seqs: Sequence[int]) -> Leaving:
        logits = self.decoder.logits(hidden)
        return Leaving((logits.softmax(-1).amax(-1) >= self.threshold).tolist(), logits)


class SkipSchedule(DepthPolicy):
    """The first and the last layers for every token, fewer in the middle the later it is
    [SkipDecode, in short].
    """

    def __init__(self, layers: int, every: int = 4, grow: bool = False) -> None:
        self.layers, self.every, self.grow = layers, every, grow

    def schedule(self, session: Session, seqs: Sequence[int]) -> Sequence[LayerRange]:
        steps = session.stats.target_passes // self.every
        skipped = max(self.layers - 2 - steps, 0) if self.grow else min(steps, self.layers - 2)
        return [(0, 1), (1 + skipped, self.layers)]


def never(exits: tuple[int, ...]) -> Any:
    """A policy that may leave and never does."""
    return RandomDepth(exits, 0, chance=0.0)
