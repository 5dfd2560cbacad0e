"""Which tokens of a draft are accepted, and why the output is still the base model's own.

Row i of the target's output verifies what follows node i of a draft (row 0: what follows the last
emitted token).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.drafter import Draft

Verdict = tuple[list[int], int]
"""The accepted path, starting with node 0, and the bonus token: the target's own after the last of
them.
"""


def accept_chosen(
    sampler: Sampler, seqs: Sequence[int], drafts: Sequence[Draft], logits: Tensor
) -> list[Verdict]:
    """The verdict on each draft of `seqs`: as `accept_greedy`, with the tokens that the target
    chooses. logits [N, V] follow all nodes, draft after draft.
    """
    counts = [len(draft.tokens) + 1 for draft in drafts]
    first = [sum(counts[:i]) for i in range(len(counts))]
    descents = [Descent(draft) for draft in drafts]
    live = list(range(len(drafts)))
    while live:  # the target's own tokens, of rows that are reached alone
        rows_reached = [first[i] + descents[i].path[-1] for i in live]
        reached = logits if len(rows_reached) == len(logits) else logits[rows_reached]
        tokens = sampler.choose(
            reached, [seqs[i] for i in live], [descents[i].drafted for i in live]
        )
        live = [i for i, token in zip(live, tokens, strict=True) if descents[i].follow(token)]
    return [(descent.path, descent.bonus) for descent in descents]


def choose_path(
    sampler: Sampler, logits: Tensor, seq: int, tokens: list[int], parents: list[int]
) -> tuple[list[int], list[int]]:
    """`runtime.fused.ChoosePath`: the sampler's tokens down a draft, of the rows that are
    reached.
    """
    [(path, bonus)] = accept_chosen(sampler, [seq], [Draft(tokens, parents)], logits)
    return path, [*(tokens[node - 1] for node in path[1:]), bonus]


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
        self._pass_unverified()

    def follow(self, token: int) -> bool:
        """The target chooses `token` after the last node; returns whether it is a drafted one."""
        child = self._draft.child(self.path[-1], token)
        if child is None:
            self.bonus = token
            return False
        self.path.append(child)
        self.drafted.append(token)
        self._pass_unverified()
        return True

    def _pass_unverified(self) -> None:
        while (child := self._draft.unverified_child(self.path[-1])) is not None:
            self.path.append(child)
            self.drafted.append(self._draft.tokens[child - 1])
