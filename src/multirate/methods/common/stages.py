"""Staged speculative decoding [Spector and Ré 2023]: steps whose drafts the narrow copy of the
model verifies, and then one pass of the model's own weights over all the tokens that these emitted.

Lossless: a token is committed as the model's own weights say, whoever drafted it, and so are its
keys and values. The narrow copy reads a third to two thirds of the bytes, and is nearly always
right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from multirate.decoding.drafter import FusedStep
from multirate.decoding.sampler import Sampler
from multirate.model.decoder import Decoder
from multirate.model.native.decoder import NativeDecoder, narrow_weights

Continuation = Callable[[int], tuple[list[int], int]]
"""most → so many tokens at most that the text had after those it ends in, and how many of these
matched; 0: none, or those of a match in other texts.
"""
_PAYS = 300
"""Tokens after which the narrow copy is made: making it takes about as long as it saves on as many
(SmolLM2-135M: a quarter of a second), and a process may end before.
"""


class Stages:
    """Whether a drafter's steps are in stages, and how they go.

    tokens: of a pass of the model's own weights, at most; 0: steps are never in stages. They are in
    generations of one sequence whose tokens are chosen by argmax, of logits or of logits and noise,
    on the native kernel, where the processor multiplies bytes. direct_match: as StagedTextConfig's.
    """

    def __init__(self, decoder: Decoder, tokens: int, direct_match: int = 0) -> None:
        self.tokens, self.direct_match = tokens, direct_match
        self._decoder: NativeDecoder | None = None
        if tokens and narrow_weights(decoder):
            self._decoder = decoder
        self._left, self._counted = _PAYS, 0
        self._sampler: Sampler | None = None

    def is_direct(self, matched: int) -> bool:
        """Whether the model's own weights verify what follows a match of so many tokens at once."""
        return 0 < self.direct_match <= matched

    def prepare(self) -> None:
        """The narrow copy is made now, not when it pays."""
        if self._decoder is not None:
            self._decoder.narrow()

    def begin(self, sampler: Sampler) -> bool:
        """A generation begins. Whether its steps are in stages."""
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
        run: Callable[[int], list[FusedStep]],
        settle: Callable[[Sequence[int]], FusedStep],
        ends: Sequence[int],
        continuation: Continuation | None = None,
    ) -> FusedStep:
        """A step in stages. limit: as of `Drafter.draft`. run: runs steps ahead that emit at most
        one token more than so many, as many steps as it likes. settle: verifies their first tokens,
        `tokens` at most, with the model's own weights. ends: as of `Drafter`. continuation: what
        the text had after the tokens it ends in; None: it is not looked up.
        """
        most, tokens = min(self.tokens, limit), list[int]()
        # the last one of a pass may be left out: it would be a step without a draft
        while len(tokens) < most - 1 or (most == 1 and not tokens):
            copied, matched = continuation(most - len(tokens)) if continuation else ([], 0)
            if copied and self.is_direct(matched):
                tokens += copied
                break
            for step in run(most - len(tokens) - 1):
                tokens += step.tokens
            if any(token in ends for token in tokens):
                break
        return settle(tokens[:most])
