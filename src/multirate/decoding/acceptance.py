"""Who of a draft is accepted, and why the output is still the base model's.

Pure functions. Node i of a draft is verified by row i of the target's output: row i tells what the base model
says *after* node i (row 0: after the root).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from multirate.decoding.drafter import Draft
from multirate.decoding.logits import draw


def accept_greedy(draft: Draft, target: Sequence[int]) -> tuple[list[int], int]:
    """Walk down from the root as long as the target's own token is among the children of the node reached.

    draft: a chain or a tree of n nodes. target: [n+1], the target's token after each node: its argmax, or, when
    sampling, a token drawn from its distribution there.
    Returns (path, bonus): accepted nodes with the root 0 first, and the target's token after the last of them.
    The emitted tokens are those of path[1:], then bonus.

    Lossless: each emitted token is target[i] of a node i whose whole path has been emitted before it (as an accepted
    child, or as the bonus), so it is what plain decoding emits after the same tokens: the argmax, or a draw from the
    same distribution, made independently of the draft. The draft decides only how many tokens a pass emits.
    [Greedy: Stern et al. 2018; for drafts that are not random this is exactly rejection sampling with a one-hot q.]
    """
    path = [0]
    if draft.is_chain:
        for node, token in enumerate(draft.tokens):
            if target[node] != token:
                return path, target[node]
            path.append(node + 1)
        return path, target[len(draft.tokens)]
    children: dict[tuple[int, int], int] = {}
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), start=1):
        children.setdefault((parent, token), node)
    while (child := children.get((path[-1], target[path[-1]]))) is not None:
        path.append(child)
    return path, target[path[-1]]


def accept_sampled(draft: Draft, p: Tensor, q: Tensor, generator: np.random.Generator) -> tuple[list[int], int]:
    """Speculative sampling over a chain [Leviathan et al. 2023, theorem 1; Chen et al. 2023].

    draft: a chain of n nodes, node i+1's token drawn from q[i]. p: [n+1, V] target probabilities after each node.
    q: [n, V]. generator: uniform numbers, independent of the draft. Returns (path, bonus) as `accept_greedy`.

    Token x ~ q is accepted with probability min(1, p(x)/q(x)); at the first rejection the bonus is drawn from
    the residual r(x) ∝ max(0, p(x) − q(x)); if all are accepted it is drawn from p[n].

    Lossless: with β = Σ min(p, q) the probability of acceptance, Σ max(0, p − q) = 1 − β, so
    P(emit x) = q(x)·min(1, p(x)/q(x)) + (1 − β)·max(0, p(x) − q(x)) / (1 − β) = min(p, q)(x) + max(0, p − q)(x) = p(x).
    It holds at every level given the tokens above, hence for the whole sequence.
    """
    n = len(draft.tokens)
    uniforms = generator.random(n + 1)
    if n:
        index = torch.tensor(draft.tokens, device=p.device)[:, None]
        p_drafted = p[:n].gather(1, index)[:, 0].tolist()
        q_drafted = q.gather(1, index)[:, 0].tolist()
        for i in range(n):
            if uniforms[i] * q_drafted[i] < p_drafted[i]:
                continue
            residual = (p[i] - q[i]).clamp_(min=0)
            # p == q rejects only by rounding; the residual is then empty and p itself is right
            source = residual if bool(residual.sum() > 0) else p[i]
            return list(range(i + 1)), draw(source[None], [uniforms[n]])[0]
    return list(range(n + 1)), draw(p[n : n + 1], [uniforms[n]])[0]
