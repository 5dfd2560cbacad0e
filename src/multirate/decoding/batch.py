"""A batch whose sequences come and go: prompts join between steps, are read a piece at a time while
others decode, and leave when they end.

A sequence's text does not depend on what else is in the batch, where the decoder's rows do not
(`Decoder.pass_dependent`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.prefill import read_rows
from multirate.decoding.prefix_tree import PrefixTree
from multirate.decoding.sampler import Observe
from multirate.decoding.session import Session
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.runtime.decoder import Decoder

_CAPACITY, _EAGER_CAPACITY = 8192, 256
"""Cache slots of a sequence to begin with: where they cost memory only if used, and elsewhere."""
_TRIMMED = 1024
"""The memory of sequences with more tokens is given back when they leave."""
OnPrompt = Callable[[int, Tensor], None]
"""on_prompt(first, hidden): h_L [n, d] of the prompt's tokens from number `first` on, as they are
read."""


@dataclass(frozen=True)
class Joining:
    """A prompt and how it is continued.

    number: which prompt of its seed, from 0. sampling, stop: None: the batch's own.
    observe: as `Sampler.restart`. on_prompt: called with every token of the prompt, so none comes
    from the prefix tree. most_drafted: tokens of a step's draft; None: the step's own limit.
    """

    prompt: Sequence[int]
    number: int = 0
    sampling: SamplingSettings | None = None
    stop: StopSettings | None = None
    observe: Observe | None = None
    on_prompt: OnPrompt | None = None
    most_drafted: int | None = None
    similar: Sequence[int] = ()
    """A text that the answer is likely to repeat."""


@dataclass
class _Reading:
    """A prompt that is being read. at: tokens in the cache."""

    joining: Joining
    at: int
    pieces: list[Mapping[int, Tensor]] = field(default_factory=list)

    def joined(self, layer: int) -> Tensor:
        parts = [piece[layer] for piece in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Batch:
    """At most `places` sequences that decode by `step`, whose generation this begins.

    sampling, stop: of sequences without their own. keep_bytes: memory for K/V of earlier texts; 0:
    none are kept.

    session: its active sequences decode. kept: the prefix tree, if there is one.
    """

    def __init__(
        self,
        decoder: Decoder,
        step: Step,
        places: int,
        sampling: SamplingSettings | None = None,
        stop: StopSettings | None = None,
        keep_bytes: int = 0,
    ) -> None:
        if not step.joins:
            raise ValueError(f"sequences cannot join a {type(step).__name__}")
        self.decoder, self.step, self.places = decoder, step, places
        self.session = Session(decoder, [], sampling, stop, places=places)
        cache = self.session.cache
        slots = _CAPACITY if cache.comes_as_used else _EAGER_CAPACITY
        cache.reserve(min(slots, decoder.info.max_positions or slots) + step.slots)
        step.begin(self.session, resumed=False)
        self.reading: dict[int, _Reading] = {}
        self._taken: set[int] = set()
        self.kept: PrefixTree | None = None
        if keep_bytes and decoder.pass_dependent is None:
            self.kept = PrefixTree([self.session.cache, *step.caches()], keep_bytes)

    @property
    def free(self) -> int:
        """How many more sequences may join."""
        return self.places - len(self._taken)

    @property
    def token_bytes(self) -> int:
        """Memory that a token of a sequence takes."""
        return sum(one.token_bytes for one in (self.session.cache, *self.step.caches()))

    def join(self, joining: Joining) -> tuple[int, int]:
        """The prompt takes a free place. Returns its sequence, and how many of its tokens need not
        be read again. Raises UserError for a prompt that cannot be used.
        """
        self.step.interrupted()
        seq = next(b for b in range(self.places) if b not in self._taken)
        session, prompt = self.session, joining.prompt
        session.join(seq, prompt, joining.number, joining.sampling, joining.stop, joining.observe)
        self._taken.add(seq)
        if joining.most_drafted is not None:
            session.draft_limits[seq] = joining.most_drafted
        at = 0
        if session.stops.reasons[seq] is None or joining.on_prompt is not None:
            if self.kept is not None and joining.on_prompt is None:
                # the last one is read again: a step may need its final residual
                at = max(self.kept.restore(seq, prompt[:-1]) - 1, 0)
                session.cache.commit(seq, at)
            self.reading[seq] = _Reading(joining, at)
        return seq, at

    def leave(self, seq: int) -> None:
        """The sequence ends, if it has not, and its place is free. Its K/V are kept."""
        self.step.interrupted()
        if seq not in self.reading and self.session.cache.lengths[seq]:
            self._keep(seq)
        self.reading.pop(seq, None)
        self._taken.discard(seq)
        self.session.leave(seq)
        self.step.leave(seq)
        cache = self.session.cache
        length = cache.lengths[seq]
        cache.truncate(seq, 0)
        if length > _TRIMMED:
            for one in (cache, *self.step.caches()):
                one.trim(seq)

    def _keep(self, seq: int) -> None:
        if self.kept is not None:
            length = min(self.session.exact_length(seq), self.step.settle(self.session, seq))
            self.kept.keep(seq, self.session.sampler.tokens[seq][:length])

    def read(self, rows: int) -> list[int]:
        """Reads up to so many tokens of prompts, those that joined first before others. Emits the
        first token of the sequences whose prompts end with them, and returns these sequences.
        """
        parts = list[tuple[int, int, Sequence[int]]]()
        for seq, one in self.reading.items():
            part = one.joining.prompt[one.at : one.at + rows]
            rows -= len(part)
            parts.append((seq, one.at, part))
            if not rows:
                break
        if not parts:
            return []
        self.step.interrupted()
        last = self.decoder.info.num_layers
        for seq, states in read_rows(self.decoder, self.session.cache, parts, self.step.taps, last):
            one = self.reading[seq]
            if one.joining.on_prompt is not None:
                one.joining.on_prompt(one.at, states[last])
            one.at += len(states[last])
            one.pieces.append(states)
        done = [seq for seq, _, _ in parts if self._is_read(seq)]
        if done:
            self._begin(done)
        return done

    def _is_read(self, seq: int) -> bool:
        one = self.reading[seq]
        return one.at == len(one.joining.prompt)

    def _begin(self, seqs: list[int]) -> None:
        """The prompts of these sequences have been read."""
        session, last = self.session, self.decoder.info.num_layers
        done = {seq: self.reading.pop(seq) for seq in seqs}
        going = [seq for seq in seqs if session.stops.reasons[seq] is None]
        hidden = {seq: done[seq].joined(last) for seq in going}
        if going:
            session.first_tokens([hidden[seq] for seq in going], going)
        going = [seq for seq in going if session.stops.reasons[seq] is None]
        if not going:
            return
        for seq in going:
            self.step.joined(session, seq, done[seq].joining.similar)
        taps = [{tap: done[seq].joined(tap) for tap in self.step.taps} for seq in going]
        self.step.prefilled(session, going, [hidden[seq] for seq in going], taps)
        for seq in going:
            self._keep(seq)

    def advance(self) -> None:
        """One step of all sequences that decode."""
        session = self.session
        session.count_steps()
        self.step.run(session)
        session.drop_finished()
        if not session.active:
            self.step.interrupted()

    @property
    def ended(self) -> list[int]:
        """The sequences that have ended by themselves and have not left."""
        reasons = self.session.stops.reasons
        return [b for b in sorted(self._taken) if reasons[b] is not None and b not in self.reading]

    def close(self) -> None:
        """Ends all sequences and gives the memory back."""
        self.step.finish(self.session)
        self.decoder.release_cache(self.session.cache)
