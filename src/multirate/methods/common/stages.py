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
from multirate.methods.common.staged_config import StagedConfig
from multirate.model.decoder import Decoder
from multirate.model.native.decoder import NativeDecoder, narrow_weights

Continuation = Callable[[int], tuple[list[int], int]]
"""most → so many tokens at most that the text had after those it ends in, and how many of these
matched; 0: none, or those of a match in other texts.
"""
Behind = tuple[Sequence[int], Sequence[int]]
"""A draft behind the tokens of steps ahead: its nodes' tokens, and their parents, 0 the last one
before it.
"""
NOTHING: Behind = (), ()
LEAST_BEHIND = 2
"""Nodes of such a draft, at least; where there are fewer, the narrow copy goes on."""
_PAYS = 300
"""Tokens after which the narrow copy is made: making it takes about as long as it saves on as many
(SmolLM2-135M: a quarter of a second), and a process may end before.
"""


def with_behind(tokens: Sequence[int], behind: Behind) -> tuple[list[int], list[int]]:
    """A chain of `tokens`, and below the last of them the draft: all tokens and their parents."""
    drafted, parents = behind
    count = len(tokens)
    return [*tokens, *drafted], [*range(count), *(count + parent for parent in parents)]


class Stages:
    """Whether a drafter's steps are in stages, and how they go.

    config: None: steps are never in stages, as where its `staged` is 0. They are in generations of
    one sequence whose tokens are chosen by argmax, of logits or of logits and noise, on the native
    kernel, where the processor multiplies bytes. tokens: of a pass of the model's own weights, at
    most.
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
        run: Callable[[int, int], list[FusedStep]],
        settle: Callable[[Sequence[int], Behind], FusedStep],
        draft: Callable[[int], Behind],
        ends: Sequence[int],
        continuation: Continuation | None = None,
    ) -> FusedStep:
        """A step in stages. limit: as of `Drafter.draft`. run: runs steps ahead that emit at most
        one token more than so many, as many steps as it likes until they have emitted as many as
        the second number says. settle: verifies their first tokens, and a draft behind them,
        `tokens` at most together, with the model's own weights. draft: a draft behind them of so
        many nodes at most. ends: as of `Drafter`. continuation: what the text had after the tokens
        it ends in; None: it is not looked up.
        """
        most, tokens = min(self.tokens, limit), list[int]()
        # the last one of a pass may be left out: it would be a step without a draft
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
            wanted = whole  # it would not save what the smaller pass costs: more steps ahead
