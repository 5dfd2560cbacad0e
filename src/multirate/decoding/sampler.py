"""The random state of one generation: settings, the tokens so far, and every sequence's random
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multirate.decoding.logits import SamplingSettings, adjusted, allowed
from multirate.runtime.decoder import argmax_rows
from multirate.runtime.noise import Noise, NoiseStream, noisy_argmax, with_noise


class Sampler:
    """Chooses tokens for rows of logits, for draft and target alike.

    Every place in every sequence has its own random numbers, whoever asks for them and in whatever
    order (runtime/noise.py). The chosen tokens therefore depend neither on the batch nor on drafts.

    tokens[b]: prompt and emitted tokens of sequence b, including the last one.
    plain: tokens are the argmax of the logits.
    bare: tokens are the argmax of logits and noise.
    by_argmax: one of these two.
    noisy_argmax: as `noise.noisy_argmax`; a decoder may have a faster one.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        prompts: Sequence[Sequence[int]],
        noisy_argmax: Callable[[Tensor, Sequence[Noise]], list[int]] = noisy_argmax,
    ) -> None:
        self.settings = settings
        self.greedy = settings.greedy
        self.plain = settings.greedy and not settings.uses_context
        self.bare = not (settings.greedy or settings.uses_context or settings.drops_tokens)
        self.by_argmax = self.plain or self.bare
        self._noisy_argmax = noisy_argmax
        self.tokens = [list(prompt) for prompt in prompts]
        self._prompts = [len(prompt) for prompt in prompts]
        if not self.greedy:
            self._seed = (
                settings.seed
                if settings.seed is not None
                else int(torch.randint(2**62, (), device="cpu").item())
            )
            self._noise = [self._noise_stream(b) for b in range(len(prompts))]

    def _noise_stream(self, number: int) -> NoiseStream:
        return NoiseStream(self._seed, number, self.settings.temperature)

    def restart(self, seq: int, prompt: Sequence[int], number: int) -> None:
        """Puts another prompt in place of sequence `seq`; it uses the `number`-th prompt's random
        numbers.
        """
        self.tokens[seq] = list(prompt)
        self._prompts[seq] = len(prompt)
        if not self.greedy:
            self._noise[seq] = self._noise_stream(number)

    def contexts(
        self, seqs: Sequence[int], paths: Sequence[Sequence[int]] | None
    ) -> list[list[int]] | None:
        """The tokens before each row: its sequence's, then the drafted `paths` tokens; None if not
        needed.
        """
        if not self.settings.uses_context:
            return None
        if paths is None:
            return [self.tokens[b] for b in seqs]
        return [[*self.tokens[b], *path] for b, path in zip(seqs, paths, strict=True)]

    def _prompt_lengths(self, seqs: Sequence[int]) -> list[int] | None:
        """How many of each row's `contexts` belong to the prompt; None if not needed."""
        return [self._prompts[b] for b in seqs] if self.settings.uses_context else None

    def noise(self, seq: int, ahead: int = 0) -> Noise:
        """The noise that is added to the logits before their argmax is taken, for the token `ahead`
        places after the next one (0: the next one). Not for greedy decoding.
        """
        place = len(self.tokens[seq])
        return self._noise[seq].at(place + ahead, begin=place)

    def _allowed(
        self, logits: Tensor, seqs: Sequence[int], paths: Sequence[Sequence[int]] | None
    ) -> tuple[Tensor, list[Noise]]:
        """The allowed tokens' logits [n, V] as float32, and the noise of each row's place."""
        ahead = [0] * len(seqs) if paths is None else [len(path) for path in paths]
        contexts = self.contexts(seqs, paths)
        scores = allowed(logits.detach(), self.settings, contexts, self._prompt_lengths(seqs))
        return scores, [self.noise(b, place) for b, place in zip(seqs, ahead, strict=True)]

    def perturbed(
        self, logits: Tensor, seqs: Sequence[int], paths: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """Float32 logits [n, V] whose argmax is each row's next token: penalised and, when
        sampling, with −inf for dropped tokens and the noise of the row's place.
        """
        if self.greedy:
            contexts = self.contexts(seqs, paths)
            return adjusted(logits, self.settings, contexts, self._prompt_lengths(seqs))
        return with_noise(*self._allowed(logits, seqs, paths))

    def choose(
        self, logits: Tensor, seqs: Sequence[int], paths: Sequence[Sequence[int]] | None = None
    ) -> list[int]:
        """The next token of each row of logits [n, V]: the argmax when greedy, drawn otherwise.
        Raises UserError if the logits are not finite (a model whose logits overflowed).
        """
        if self.greedy:
            return argmax_rows(self.perturbed(logits, seqs, paths).detach())
        return self._noisy_argmax(*self._allowed(logits, seqs, paths))
