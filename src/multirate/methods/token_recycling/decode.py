"""Drafts from an adjacency matrix of the target's own runners-up [Luo et al. 2024]. No training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from multirate.decoding.drafter import Draft, Drafter, Verified
from multirate.decoding.sampler import Sampler
from multirate.methods.token_recycling.config import TokenRecyclingConfig
from multirate.model.decoder import Decoder
from multirate.model.kv_cache import KVCache

_PROMPT_ROWS = 64  # whose logits [rows, V] exist at once


class TokenRecyclingDrafter(Drafter):
    """A static tree over the `k` likeliest successors last seen after each token.

    Every row that the target computes, rejected ones included, renews the entry of its token. All
    sequences of a batch share the matrix; a generation begins with an empty one.
    """

    def __init__(self, decoder: Decoder, config: TokenRecyclingConfig) -> None:
        self.decoder = decoder
        self.top = min(config.k, decoder.info.vocab_size)
        self.tree = static_tree(config.tree, self.top)
        self.max_nodes = len(self.tree)
        self._successors: dict[int, list[int]] = {}
        self._drafted: dict[
            int, list[int]
        ] = {}  # the tokens of each sequence's last draft, the last token first

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        self._successors = {}

    def usable(self, cache: KVCache, length: int) -> int:
        return length  # whatever the matrix holds, the text stays the target's

    def resume(self, cache: KVCache, sampler: Sampler) -> None:
        """Goes on with the matrix of the generation before."""

    def prefill(
        self,
        seqs: Sequence[int],
        prompts: Sequence[Sequence[int]],
        hidden_final: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        """What the target would have said after each token of the prompts."""
        for prompt, hidden in zip(prompts, hidden_final, strict=True):
            tokens = prompt[len(prompt) - len(hidden) :]
            for begin in range(0, len(tokens), _PROMPT_ROWS):
                part = slice(begin, begin + _PROMPT_ROWS)
                best = self.decoder.top_tokens(self.decoder.logits(hidden[part]), self.top)
                self._successors.update(zip(tokens[part], best, strict=True))

    def draft(
        self,
        seqs: Sequence[int],
        last_tokens: Sequence[int],
        limits: Sequence[int],
        sampler: Sampler,
    ) -> list[Draft]:
        """See Drafter. Where a token was never seen, the tree has no nodes below it."""
        return [self._expand(b, token) for b, token in zip(seqs, last_tokens, strict=True)]

    def accept(self, seq: int, verified: Verified) -> None:
        """Every row renews its token's successors; where a token has several, an accepted row
        wins.
        """
        assert verified.top is not None
        drafted, top = self._drafted[seq], verified.top
        self._successors.update(zip(drafted, top, strict=False))  # the draft may have been cut
        self._successors.update((drafted[row], top[row]) for row in verified.path)

    def _expand(self, seq: int, last_token: int) -> Draft:
        tokens, parents = [last_token], []
        numbers = [
            0
        ]  # of each node of the static tree its number in the draft; -1: it is not there
        for parent, rank in self.tree:
            above = numbers[parent]
            successors = self._successors.get(tokens[above], ()) if above >= 0 else ()
            if rank < len(successors):
                numbers.append(len(tokens))
                tokens.append(successors[rank])
                parents.append(above)
            else:
                numbers.append(-1)
        self._drafted[seq] = tokens
        return Draft(tokens[1:], parents)


def static_tree(widths: Sequence[int], k: int) -> list[tuple[int, int]]:
    """(parent node, rank among its successors) of nodes 1, 2, …, breadth first; node 0 is the last
    token.

    Depth d has the `widths[d - 1]` nodes whose ranks (from 1) along the path have the least
    product: the likeliest successor gets the most nodes below it. [ours; the paper's tree of 80
    nodes was fitted to its models]
    """
    nodes: list[tuple[int, int]] = []
    level = [(1, 0)]  # (product of the ranks, node)
    for width in widths:
        options = ((cost * (rank + 1), node, rank) for cost, node in level for rank in range(k))
        chosen = sorted(options)[:width]
        level = [(cost, len(nodes) + i) for i, (cost, _, _) in enumerate(chosen, start=1)]
        nodes += [(node, rank) for _, node, rank in chosen]
    return nodes
