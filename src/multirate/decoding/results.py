"""What a generation returns: tokens, why each sequence ended, and counts to quote speed from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from multirate.model.time_split import TimeSplit

FinishReason = Literal["eos", "stop_string", "length", "context"]
OnTokens = Callable[[int, list[int]], None]  # (sequence, newly emitted tokens), for streaming


@dataclass
class DecodeStats:
    """Counts of one `generate` call, summed over its sequences.

    tokens: emitted tokens, the first ones (which the prefill yields) included.
    target_passes: forward calls of the base model after the prefill, each for all unfinished
    sequences.
    sequence_steps: the same counted once per sequence taking part (equal to target_passes at batch
    1).
    drafted, drafted_levels: nodes proposed, and depths of the drafts (equal for chains).
    accepted: drafted tokens emitted.
    tried_at, accepted_at: by a drafted token's place in its draft, from 0 on: how many were judged
    (all before them were accepted), and how many of these were accepted.
    exits: layers run → tokens emitted after so many; empty where every token takes all layers.
    doubted: rows of which narrow weights were not sure enough, so that the model's own ran them
    again.
    refused: the highest score with which a token was too uncertain to leave early: with any
    threshold above it the text is the same. −inf: none was; None: unknown.
    resumed: prompt tokens that were not read again (see prefix_cache.py).
    seconds: wall-clock of the whole call; prefill_seconds: the part of it up to the first tokens.
    split: of the others; None: the decoder does not tell.
    """

    tokens: int = 0
    target_passes: int = 0
    sequence_steps: int = 0
    drafted: int = 0
    drafted_levels: int = 0
    accepted: int = 0
    tried_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    first_tokens: int = 0
    resumed: int = 0
    exits: dict[int, int] = field(default_factory=dict)
    doubted: int = 0
    refused: float | None = None
    split: TimeSplit | None = None

    def count_exits(self, layers: int, tokens: int) -> None:
        """`tokens` tokens were emitted after `layers` layers."""
        if tokens:
            self.exits[layers] = self.exits.get(layers, 0) + tokens

    def count_draft(self, drafted: int, levels: int, accepted: int) -> None:
        """A draft of one sequence had `drafted` nodes, `levels` deep, of which `accepted` were
        emitted.
        """
        self.drafted += drafted
        self.drafted_levels += levels
        self.accepted += accepted
        judged = min(levels, accepted + 1)
        for counts in (self.tried_at, self.accepted_at):
            counts += [0] * (judged - len(counts))
        for place in range(judged):
            self.tried_at[place] += 1
            self.accepted_at[place] += place < accepted

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per target pass and sequence, the verification's own token included; plain
        decoding has 1.
        """
        return (
            (self.tokens - self.first_tokens) / self.sequence_steps if self.sequence_steps else 0.0
        )

    @property
    def acceptance(self) -> float:
        """Accepted tokens / drafted levels (for chains: / drafted tokens); 0 when nothing was
        drafted.
        """
        return self.accepted / self.drafted_levels if self.drafted_levels else 0.0


@dataclass
class GenerationOutput:
    """sequences[b]: new tokens only, the token that ended it (EOS, end of a stop string) included.

    finish_reasons[b]: "eos", "stop_string", "length" (max_new_tokens) or "context" (the model's
    positions are used up).
    """

    sequences: list[list[int]]
    finish_reasons: list[FinishReason]
    stats: DecodeStats = field(default_factory=DecodeStats)
