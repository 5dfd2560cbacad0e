"""What a generation returns: tokens, why each sequence ended, and counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from multirate.runtime.time_split import TimeSplit

FinishReason = Literal["eos", "stop_string", "length", "context"]
Origin = Literal["model", "draft", "text"]
"""Who proposed an emitted token: the model itself, the method's own drafts, or text lookup."""
OnTokens = Callable[[int, list[int]], None]  # (sequence, newly emitted tokens), for streaming


@dataclass
class DecodeStats:
    """Counts of one `generate` call, summed over its sequences."""

    tokens: int = 0
    """Emitted tokens, including the first ones, which the prefill yields."""
    target_passes: int = 0
    """Forward calls of the base model after the prefill, each for all unfinished sequences."""
    sequence_steps: int = 0
    """The same, counted once per sequence that takes part; equal to target_passes for one
    sequence.
    """
    drafted: int = 0
    """Draft nodes verified."""
    drafted_levels: int = 0
    """Summed depths of the drafts; equal to `drafted` for chains."""
    accepted: int = 0
    """Drafted tokens emitted."""
    tried_at: list[int] = field(default_factory=list)
    """By a token's place in its draft, from 0: how many were checked because all before them were
    accepted.
    """
    accepted_at: list[int] = field(default_factory=list)
    """By a token's place in its draft, from 0: how many of those in tried_at were accepted."""
    seconds: float = 0.0
    """Wall-clock time of the whole call."""
    prefill_seconds: float = 0.0
    """Time until the first tokens."""
    first_tokens: int = 0
    """Tokens emitted by the prefill."""
    resumed: int = 0
    """Prompt tokens that were not read again because their K/V were kept (prefix_cache.py)."""
    exits: dict[int, int] = field(default_factory=dict)
    """Number of layers → tokens emitted after that many layers. Empty if every token takes all
    layers.
    """
    highest_rejected: float | None = None
    """Dynamic mode: the highest score that was too low for a token to leave early. With any
    threshold above it the text is the same. −inf: no score was too low; None: unknown.
    """
    split: TimeSplit | None = None
    """Where the time after the prefill went; None if the decoder does not measure it."""

    def count_exits(self, layers: int, tokens: int) -> None:
        """Counts `tokens` tokens emitted after `layers` layers."""
        if tokens:
            self.exits[layers] = self.exits.get(layers, 0) + tokens

    def count_draft(self, drafted: int, levels: int, accepted: int) -> None:
        """Counts one sequence's draft with `drafted` nodes and depth `levels`, `accepted` of its
        tokens emitted.
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
        """Tokens emitted per target pass and sequence, including the token that verification itself
        yields. Plain decoding has 1.
        """
        return (
            (self.tokens - self.first_tokens) / self.sequence_steps if self.sequence_steps else 0.0
        )

    @property
    def acceptance(self) -> float:
        """Accepted tokens / drafted levels (for chains: / drafted tokens); 0 without drafts."""
        return self.accepted / self.drafted_levels if self.drafted_levels else 0.0


@dataclass
class GenerationOutput:
    """The new tokens of every prompt, in the order of the prompts."""

    sequences: list[list[int]]
    """For each prompt, its new tokens, including the one that ended it (end-of-text token, or the
    end of a stop string).
    """
    finish_reasons: list[FinishReason]
    """For each prompt: "eos", "stop_string", "length" (max_new_tokens) or "context" (the model's
    positions are used up).
    """
    stats: DecodeStats = field(default_factory=DecodeStats)
    """Counts and times of the call."""
