"""Two-stage verification (staged speculative decoding) [Spector and Ré 2023]: a quantised copy of
the model verifies the drafts of several steps, then the full-precision weights verify all tokens of
these steps in one pass.

Lossless: the full-precision weights decide every committed token and its keys and values, whatever
drafted it. The quantised copy reads a third to two thirds of the bytes, and is nearly always right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from multirate.decoding.drafter import FusedStep
from multirate.decoding.sampler import Sampler
from multirate.methods.common.staged_config import StagedConfig
from multirate.model.decoder import Decoder
from multirate.model.native.decoder import NativeDecoder, narrow_weights

Continuation = Callable[[int], tuple[list[int], int]]
"""most → at most `most` tokens that followed where the text's end occurred before, and the match
length; 0: no match, or one in other texts.
"""
Behind = tuple[Sequence[int], Sequence[int]]
"""A tail draft: the tokens of its nodes and their parents; 0 is the last token before it."""
NOTHING: Behind = (), ()
LEAST_BEHIND = 2
"""Minimum number of nodes in a tail draft; with fewer, the quantised copy continues."""
_PAYS = 300
"""Tokens after which the quantised copy is made. Making it takes about as long as it saves over
this many tokens (SmolLM2-135M: a quarter of a second), and a process may end before.
"""


def with_behind(tokens: Sequence[int], behind: Behind) -> tuple[list[int], list[int]]:
    """A chain of `tokens` with the tail draft below its last one: all tokens and their parents."""
    drafted, parents = behind
    count = len(tokens)
    return [*tokens, *drafted], [*range(count), *(count + parent for parent in parents)]


class Stages:
    """Decides whether a drafter's steps use two-stage verification, and runs them.

    config: None, or `staged` 0: never. Otherwise in generations of one sequence whose tokens are
    chosen by argmax, of logits or of logits and noise, on the native kernel and a processor with
    byte multiplication. tokens: maximum number in a pass of the full-precision weights.
    """

    def __init__(self, decoder: Decoder, config: StagedConfig | None) -> None:
        self.tokens = 0 if config is None else config.staged
        self.direct_match = getattr(config, "direct_match", 0)  # StagedTextConfig's
        self._ahead = 0 if config is None else config.staged_ahead
        self._decoder: NativeDecoder | None = None
        if self.tokens and narrow_weights(decoder):
            self._decoder = decoder
        self._left, self._counted = _PAYS, 0
        self._sampler: Sampler | None = None

    def is_direct(self, matched: int) -> bool:
        """Whether the full-precision weights verify directly what follows a match of this
        length.
        """
        return 0 < self.direct_match <= matched

    def prepare(self) -> None:
        """Makes the quantised copy now, not only after a number of tokens."""
        if self._decoder is not None:
            self._decoder.narrow()

    def begin(self, sampler: Sampler) -> bool:
        """Starts a generation; returns whether its steps use two-stage verification."""
        decoder, before = self._decoder, self._sampler
        if decoder is None:
            return False
        if before is not None:
            self._left -= len(before.tokens[0]) - self._counted
        self._sampler, self._counted = sampler, len(sampler.tokens[0])
        if len(sampler.tokens) > 1 or not sampler.by_argmax:
            return False
        return decoder.has_narrow or self._left <= 0

    def run(
        self,
        limit: int,
        run: Callable[[int, int], list[FusedStep]],
        settle: Callable[[Sequence[int], Behind], FusedStep],
        draft: Callable[[int], Behind],
        ends: Sequence[int],
        continuation: Continuation | None = None,
    ) -> FusedStep:
        """A step with two-stage verification.

        limit: as in `Drafter.draft`.
        run(room, wanted): runs steps that the quantised copy verifies. They emit at most room + 1
            tokens, as many steps as needed until they have emitted `wanted`.
        settle: verifies the first of these tokens, and a tail draft, at most `tokens` together,
            with the full-precision weights.
        draft: makes a tail draft with at most this many nodes.
        ends: as in `Drafter`.
        continuation: text lookup after the tokens that the text ends in; None: no lookup.
        """
        most, tokens = min(self.tokens, limit), list[int]()
        # one token less is enough: the last would be a round without a draft
        whole = min(max(most - 1, 1), most)
        wanted = min(self._ahead, whole)
        while True:
            while len(tokens) < wanted:
                left = most - len(tokens)
                copied, matched = continuation(left) if continuation else ([], 0)
                if copied and self.is_direct(matched):
                    return settle([*tokens, *copied][:most], NOTHING)
                for step in run(left - 1, wanted - len(tokens)):
                    tokens += step.tokens
                if any(token in ends for token in tokens):
                    return settle(tokens[:most], NOTHING)
            left = most - len(tokens)
            if len(tokens) >= whole or left < LEAST_BEHIND:
                return settle(tokens[:most], NOTHING)
            behind = draft(left)
            if len(behind[0]) >= LEAST_BEHIND:
                return settle(tokens, behind)
            wanted = whole  # too small a tail draft to be worth it: more rounds instead
