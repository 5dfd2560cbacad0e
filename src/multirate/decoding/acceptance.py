"""Which tokens of a draft are accepted, and why the output is still the base model's own (except
with `Typical`).

Row i of the target's output verifies what follows node i of a draft (row 0: what follows the last
emitted token).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from multirate.decoding.drafter import Draft
from multirate.decoding.logits import draw
from multirate.decoding.sampler import Sampler
from multirate.errors import say_once

Verdict = tuple[list[int], int]
"""The accepted path, starting with node 0, and the bonus token: the target's own after the last of
them.
"""


class Acceptance(Protocol):
    """Decides which nodes of drafts are kept.

    lossless: whether the output is the target's own. For a bare argmax a lossless rule has no
        choice, so the step applies `accept_greedy` directly.
    lossless_when_greedy: whether it is when decoding greedily.
    """

    @property
    def lossless(self) -> bool: ...

    @property
    def lossless_when_greedy(self) -> bool: ...

    def __call__(
        self, sampler: Sampler, seqs: Sequence[int], drafts: Sequence[Draft], logits: Tensor
    ) -> list[Verdict]:
        """The verdict on each draft of `seqs`. logits [N, V] follow all nodes, draft after
        draft.
        """
        ...


class Exact:
    """Lossless: a drafted token is accepted if it is the token that the target chooses, or by
    speculative sampling if the draft was drawn from `probs`.
    """

    lossless = lossless_when_greedy = True

    def __call__(
        self, sampler: Sampler, seqs: Sequence[int], drafts: Sequence[Draft], logits: Tensor
    ) -> list[Verdict]:
        counts = [len(draft.tokens) + 1 for draft in drafts]
        first = [sum(counts[:i]) for i in range(len(counts))]
        descents = [Descent(draft) for draft in drafts]
        live = []
        for i, (b, draft, descent) in enumerate(zip(seqs, drafts, descents, strict=True)):
            if draft.probs is None or not draft.is_chain or sampler.greedy:
                live.append(i)
                continue
            rows = slice(first[i], first[i] + counts[i])
            paths = draft.path_tokens() if sampler.settings.uses_context else None
            p = sampler.distribution(logits[rows], [b] * counts[i], paths)
            descent.path, descent.bonus = accept_sampled(
                draft, p, draft.probs, sampler.generators[b]
            )
        while live:  # the target's own tokens, of rows that are reached alone
            rows_reached = [first[i] + descents[i].path[-1] for i in live]
            reached = logits if len(rows_reached) == len(logits) else logits[rows_reached]
            tokens = sampler.choose(
                reached, [seqs[i] for i in live], [descents[i].drafted for i in live]
            )
            live = [i for i, token in zip(live, tokens, strict=True) if descents[i].follow(token)]
        return [(descent.path, descent.bonus) for descent in descents]


@dataclass(frozen=True)
class Typical:
    """Typical acceptance [Cai et al. 2024, Medusa]: a drafted token is kept if the target finds it
    likely enough.

    A token x after which the target's distribution is p is kept when p(x) > min(epsilon, delta ·
    exp(−H(p))): the less certain the target is, the less probable a token may be. The deepest path
    whose tokens are all kept is accepted, and the target chooses the bonus token after it.

    Lossy when sampling: the text is plausible but does not have the target's distribution. When
    greedy, p is one-hot and this is exact acceptance, which a warning says once. epsilon, delta:
    above 0, below 1.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    lossless = False
    lossless_when_greedy = True

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; accepted: a number above 0 and below 1"
                )

    def __call__(
        self, sampler: Sampler, seqs: Sequence[int], drafts: Sequence[Draft], logits: Tensor
    ) -> list[Verdict]:
        if sampler.greedy:
            say_once("at temperature 0 typical acceptance is exact: the text is the model's own")
        counts, row_seqs, paths = _row_contexts(sampler, seqs, drafts)
        probs = sampler.distribution(logits, row_seqs, paths)
        entropy = torch.special.entr(probs).sum(-1)
        floors = torch.clamp(self.delta * torch.exp(-entropy), max=self.epsilon)
        verdicts = []
        for b, draft, p, floor in zip(
            seqs, drafts, probs.split(counts), floors.split(counts), strict=True
        ):
            path = self._longest(draft, p, floor)
            last = p[path[-1]][None]
            bonus = int(last.argmax()) if sampler.greedy else sampler.draw(last, [b])[0]
            verdicts.append((path, bonus))
        return verdicts

    @staticmethod
    def _longest(draft: Draft, p: Tensor, floor: Tensor) -> list[int]:
        kept: dict[int, list[int]] = {0: [0]}  # node → its path, for nodes whose whole path is kept
        if draft.tokens:
            parents = torch.tensor(draft.parents, device=p.device, dtype=torch.int64)
            drafted = p[parents, torch.tensor(draft.tokens, device=p.device, dtype=torch.int64)]
            likely = (drafted > floor[parents]).tolist()
            for node, (parent, good) in enumerate(zip(draft.parents, likely, strict=True), start=1):
                if (good or node in draft.trusted) and parent in kept:
                    kept[node] = [*kept[parent], node]
        return max(kept.values(), key=len)


def _row_contexts(
    sampler: Sampler, seqs: Sequence[int], drafts: Sequence[Draft]
) -> tuple[list[int], list[int], list[list[int]] | None]:
    """Rows of each draft; the sequence of every row; the drafted tokens before every row, where
    they matter.
    """
    counts = [len(draft.tokens) + 1 for draft in drafts]
    row_seqs = [b for b, count in zip(seqs, counts, strict=True) for _ in range(count)]
    if not sampler.settings.uses_context:
        return counts, row_seqs, None
    return counts, row_seqs, [path for draft in drafts for path in draft.path_tokens()]


def split(values: list[int], counts: Sequence[int]) -> list[list[int]]:
    """`values` cut into parts of the given lengths."""
    parts, start = [], 0
    for count in counts:
        parts.append(values[start : start + count])
        start += count
    return parts


def accept_greedy(draft: Draft, target: Sequence[int]) -> tuple[list[int], int]:
    """Walks down from node 0 as long as one child of the current node has the target's own token.

    draft: a chain or a tree of n nodes. target: [n+1], the target's token after each node: its
    argmax or, when sampling, a token drawn from its distribution there (needed at least after the
    nodes that are reached). Returns (path, bonus): the accepted nodes, starting with 0, and the
    target's token after the last of them. The emitted tokens are those of path[1:], then bonus.

    Lossless if no node is accepted unverified: each emitted token is target[i] of a node i whose
    whole path was emitted before it. Plain decoding emits the same token after the same tokens: the
    argmax, or the draw with the random numbers of that place, which serve no other place and which
    no draft changes. The draft decides only how many tokens a pass emits. [Greedy: Stern et al.
    2018; sampled: Daliri, Musco, Suresh 2024; for deterministic drafts it accepts as often as
    rejection sampling with a one-hot q.]
    """
    descent = Descent(draft)
    while descent.follow(target[descent.path[-1]]):
        pass
    return descent.path, descent.bonus


class Descent:
    """The way down a draft; nodes accepted unverified are passed without a check.

    path: the nodes so far, starting with 0.
    drafted: their tokens, without node 0's.
    bonus: at the end, the target's token after the last node.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.path, self.drafted, self.bonus = [0], list[int](), -1
        self._pass_trusted()

    def follow(self, token: int) -> bool:
        """The target chooses `token` after the last node; returns whether it is a drafted one."""
        child = self._draft.child(self.path[-1], token)
        if child is None:
            self.bonus = token
            return False
        self.path.append(child)
        self.drafted.append(token)
        self._pass_trusted()
        return True

    def _pass_trusted(self) -> None:
        while (child := self._draft.trusted_child(self.path[-1])) is not None:
            self.path.append(child)
            self.drafted.append(self._draft.tokens[child - 1])


def accept_sampled(
    draft: Draft, p: Tensor, q: Tensor, generator: np.random.Generator
) -> tuple[list[int], int]:
    """Speculative sampling over a chain [Leviathan et al. 2023, theorem 1; Chen et al. 2023].

    draft: a chain of n nodes, node i+1's token drawn from q[i]. p: [n+1, V] target probabilities
    after each node.
    q: [n, V]. generator: uniform numbers, independent of the draft. Returns (path, bonus) as
    `accept_greedy`.

    Token x ~ q is accepted with probability min(1, p(x)/q(x)); at the first rejection the bonus is
    drawn from the residual r(x) ∝ max(0, p(x) − q(x)); if all are accepted it is drawn from p[n].

    Lossless: with β = Σ min(p, q) the probability of acceptance, Σ max(0, p − q) = 1 − β, so P(emit
    x) = q(x)·min(1, p(x)/q(x)) + (1 − β)·max(0, p(x) − q(x)) / (1 − β) = min(p, q)(x) + max(0, p −
    q)(x) = p(x). It holds at every level given the tokens above, hence for the whole sequence.
    """
    n = len(draft.tokens)
    uniforms = generator.random(n + 1)
    if n:
        index = torch.tensor(draft.tokens, device=p.device, dtype=torch.int64)[:, None]
        p_drafted = p[:n].gather(1, index)[:, 0].tolist()
        q_drafted = q.gather(1, index)[:, 0].tolist()
        for i in range(n):
            if i + 1 in draft.trusted or uniforms[i] * q_drafted[i] < p_drafted[i]:
                continue
            residual = (p[i] - q[i]).clamp_(min=0)
            # p == q rejects only by rounding; the residual is then empty and p itself is right
            source = residual if bool(residual.sum() > 0) else p[i]
            return list(range(i + 1)), draw(source[None], [uniforms[n]])[0]
    return list(range(n + 1)), draw(p[n : n + 1], [uniforms[n]])[0]
