"""The random state of one generation: every sequence's settings, tokens so far and random
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multirate.decoding.logits import SamplingSettings, adjusted, allowed
from multirate.runtime.decoder import argmax_rows
from multirate.runtime.noise import NO_NOISE, Noise, NoiseStream, noisy_argmax, with_noise

Observe = Callable[[Tensor, int], None]
"""observe(logits [V], token): the model's own logits at a sequence's next place, and what was
chosen there."""


@dataclass(frozen=True)
class _Sequence:
    """How one sequence's tokens are chosen. prompt: its length."""

    settings: SamplingSettings
    prompt: int
    noise: NoiseStream | None
    observe: Observe | None

    @property
    def by_argmax(self) -> bool:
        """Whether its tokens are the argmax of logits and noise, and nobody looks at the logits."""
        settings = self.settings
        dropped = not settings.greedy and settings.drops_tokens
        return not (settings.uses_context or dropped or self.observe is not None)


class Sampler:
    """Chooses tokens for rows of logits, for draft and target alike.

    Every place in every sequence has its own random numbers, whoever asks for them and in whatever
    order (runtime/noise.py). The chosen tokens therefore depend neither on the batch nor on drafts.

    tokens[b]: prompt and emitted tokens of sequence b, including the last one.
    isolates: whether an error that a sequence's processors raise is noted in `failed`, by sequence,
        instead of ending the step of all. What is chosen for it then is of no use.
    noisy_argmax: as `noise.noisy_argmax`; a decoder may have a faster one.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        prompts: Sequence[Sequence[int]],
        noisy_argmax: Callable[[Tensor, Sequence[Noise]], list[int]] = noisy_argmax,
    ) -> None:
        self._noisy_argmax = noisy_argmax
        self.tokens = [list(prompt) for prompt in prompts]
        self.isolates = False
        self.failed: dict[int, Exception] = {}
        self._common = settings
        self._seed = None if settings.greedy else _seed_of(settings)
        self._sequences = [
            _Sequence(settings, len(prompt), self._noise_stream(settings, self._seed, b), None)
            for b, prompt in enumerate(prompts)
        ]

    @staticmethod
    def _noise_stream(
        settings: SamplingSettings, seed: int | None, number: int
    ) -> NoiseStream | None:
        return None if seed is None else NoiseStream(seed, number, settings.temperature)

    def restart(
        self,
        seq: int,
        prompt: Sequence[int],
        number: int,
        settings: SamplingSettings | None = None,
        observe: Observe | None = None,
    ) -> None:
        """Puts another prompt in place of sequence `seq`; it uses the `number`-th prompt's random
        numbers of its seed. settings: its own; None: those of all. observe: called for each of its
        tokens as it is chosen.
        """
        seed = self._seed
        if settings is None:
            settings = self._common
        else:
            seed = None if settings.greedy else _seed_of(settings)
        self.tokens[seq] = list(prompt)
        noise = self._noise_stream(settings, seed, number)
        self._sequences[seq] = _Sequence(settings, len(prompt), noise, observe)
        self.failed.pop(seq, None)

    # -- how tokens are chosen ---------------------------------------------------------------------

    def by_argmax(self, seqs: Sequence[int]) -> bool:
        """Whether all these sequences' tokens are the argmax of logits and `noises`."""
        return all(self._sequences[b].by_argmax for b in seqs)

    def greedy(self, seqs: Sequence[int]) -> bool:
        """Whether none of them is sampled."""
        return all(self._sequences[b].settings.greedy for b in seqs)

    def uses_context(self, seqs: Sequence[int]) -> bool:
        """Whether the tokens of one of them depend on those before in other ways than through the
        model.
        """
        return any(self._sequences[b].settings.uses_context for b in seqs)

    def forced(self, seqs: Sequence[int]) -> dict[int, list[int]]:
        """What must follow the tokens of these sequences, where something must."""
        found = {}
        for b in seqs:
            forced = self._sequences[b].settings.forced
            if forced is None:
                continue
            try:
                tokens = list(forced(self.tokens[b]))
            except Exception as error:
                if not self.isolates:
                    raise
                self.failed.setdefault(b, error)
                continue
            if tokens:
                found[b] = tokens
        return found

    def noises(self, seqs: Sequence[int], ahead: Sequence[int]) -> list[Noise] | None:
        """The noise that is added to the logits before their argmax is taken: for seqs[i], of the
        token ahead[i] places after the next one (0: the next one). None: all are greedy.
        """
        if self.greedy(seqs):
            return None
        return [self._noise(b, place) for b, place in zip(seqs, ahead, strict=True)]

    def _noise(self, seq: int, ahead: int) -> Noise:
        stream, place = self._sequences[seq].noise, len(self.tokens[seq])
        return NO_NOISE if stream is None else stream.at(place + ahead, begin=place)

    def contexts(
        self, seqs: Sequence[int], paths: Sequence[Sequence[int]] | None
    ) -> list[list[int]] | None:
        """The tokens before each row: its sequence's, then the drafted `paths` tokens; None if not
        needed.
        """
        if not self.uses_context(seqs):
            return None
        if paths is None:
            return [self.tokens[b] for b in seqs]
        return [[*self.tokens[b], *path] for b, path in zip(seqs, paths, strict=True)]

    # -- choosing ----------------------------------------------------------------------------------

    def perturbed(
        self, logits: Tensor, seqs: Sequence[int], paths: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """Float32 logits [n, V] whose argmax is each row's next token: penalised and, when
        sampling, with −inf for dropped tokens and the noise of the row's place.
        """
        parts = self._alike(seqs)
        if len(parts) == 1:
            return self._perturbed_alike(logits, seqs, paths)
        found: list[Tensor] = [logits] * len(seqs)
        for part in parts:
            rows = self._perturbed_alike(logits[part], *_part(seqs, paths, part))
            for i, row in zip(part, rows, strict=True):
                found[i] = row
        return torch.stack(found)

    def _perturbed_alike(
        self, logits: Tensor, seqs: Sequence[int], paths: Sequence[Sequence[int]] | None
    ) -> Tensor:
        scores, noise = self._scores(logits, seqs, paths)
        return scores if noise is None else with_noise(scores, noise)

    def choose(
        self, logits: Tensor, seqs: Sequence[int], paths: Sequence[Sequence[int]] | None = None
    ) -> list[int]:
        """The next token of each row of logits [n, V]: the argmax when greedy, drawn otherwise.
        Raises UserError if the logits are not finite (a model whose logits overflowed).
        """
        parts, chosen = self._alike(seqs), [0] * len(seqs)
        for part in parts:
            rows = logits if len(parts) == 1 else logits[part]
            scores, noise = self._scores(rows, *_part(seqs, paths, part))
            scores = scores.detach()
            tokens = argmax_rows(scores) if noise is None else self._noisy_argmax(scores, noise)
            for i, token in zip(part, tokens, strict=True):
                chosen[i] = token
        for row, (seq, token) in enumerate(zip(seqs, chosen, strict=True)):
            observe = self._sequences[seq].observe
            if observe is not None:
                observe(logits[row], token)
        return chosen

    def _alike(self, seqs: Sequence[int]) -> list[list[int]]:
        """Indices into `seqs`, one list for each of the settings that they have."""
        parts: dict[int, list[int]] = {}
        for i, b in enumerate(seqs):
            parts.setdefault(id(self._sequences[b].settings), []).append(i)
        return list(parts.values())

    def _scores(
        self, logits: Tensor, seqs: Sequence[int], paths: Sequence[Sequence[int]] | None
    ) -> tuple[Tensor, list[Noise] | None]:
        """What the settings of these sequences, which are the same, make of their rows of logits
        [n, V], and the noise that is to be added.
        """
        settings = self._sequences[seqs[0]].settings if seqs else self._common
        contexts = self.contexts(seqs, paths)
        prompts = None if contexts is None else [self._sequences[b].prompt for b in seqs]
        try:
            if settings.greedy:
                scores = adjusted(logits, settings, contexts, prompts)
            else:
                scores = allowed(logits.detach(), settings, contexts, prompts)
        except Exception as error:
            if not self.isolates or settings.processors is None:
                raise
            scores = logits.detach().float()
            for b in seqs:
                self.failed.setdefault(b, error)
        ahead = [0] * len(seqs) if paths is None else [len(path) for path in paths]
        return scores, self.noises(seqs, ahead)


def _part(
    seqs: Sequence[int], paths: Sequence[Sequence[int]] | None, part: Sequence[int]
) -> tuple[list[int], list[Sequence[int]] | None]:
    """Those at these places."""
    return [seqs[i] for i in part], None if paths is None else [paths[i] for i in part]


def _seed_of(settings: SamplingSettings) -> int:
    if settings.seed is not None:
        return settings.seed
    return int(torch.randint(2**62, (), device="cpu").item())
