"""What a model asks for where the caller does not: sampling, length and end of a text."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from multirate.decoding import generation_config
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError, say_once
from multirate.runtime.decoder import Decoder


class GenerationDefaults:
    """The settings in the generation_config of `model`, for an `Engine`."""

    model: Any
    tokenizer: Any
    decoder: Decoder

    def sampling(self, **given: Any) -> SamplingSettings:
        """The sampling settings of the model's generation_config, with the given fields of
        SamplingSettings replaced.

        Warns once about settings that it ignores, and if the generation_config asks for sampling
        and you gave no temperature.
        """
        config = self._generation_config()
        info = self.decoder.info
        ends = eos_token_ids(self.model, self.tokenizer)
        found = generation_config.sampling_of(config, ends, info.vocab_size, info.device, given)
        others = generation_config.unfollowed(config)
        if others:
            say_once(
                f"{generation_config.WHERE} asks for {', '.join(others)}, which multirate "
                "ignores: the text may differ from that of transformers' generate"
            )
        if generation_config.samples(config) and "temperature" not in given and not found.greedy:
            say_once(
                f"{generation_config.WHERE} asks for sampling, so multirate samples (temperature "
                f"{found.temperature:g}, top_k {found.top_k}, top_p {found.top_p:g}); set "
                "temperature 0 for greedy decoding"
            )
        return found

    def stopping(
        self, max_new_tokens: int | None = 256, stop_strings: Sequence[str] | None = None
    ) -> StopSettings:
        """Stop settings with the model's end-of-text tokens and the tokenizer.

        max_new_tokens: default 256; None for no limit but the context.
        stop_strings: None uses those of the model's generation_config.
        """
        if stop_strings is None:
            stop_strings = self._stop_strings()
        return StopSettings(
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids(self.model, self.tokenizer),
            stop_strings=stop_strings,  # type: ignore[arg-type]  # one text or several
            decode=None if self.tokenizer is None else self.tokenizer.decode,
        )

    def stopping_after(
        self, prompts: Sequence[Sequence[int]], stop_strings: Sequence[str] | None = None
    ) -> StopSettings:
        """`stopping` with the length that the model's generation_config sets for these prompts
        (max_new_tokens or max_length), or 256 new tokens.
        """
        longest = max(map(len, prompts), default=0)
        most = generation_config.new_tokens(self._generation_config(), longest, 256)
        return self.stopping(most, stop_strings)

    def _generation_config(self) -> Any:
        return getattr(self.model, "generation_config", None)

    def _stop_strings(self) -> Sequence[str]:
        asked = generation_config.stop_strings(self._generation_config())
        if asked and self.tokenizer is None:
            say_once(
                f"ignoring stop_strings in {generation_config.WHERE}: they need the model's "
                "tokenizer"
            )
            return ()
        return asked

    def _padding(self) -> int | None:
        """The id that prompts are padded with, where there is one."""
        sources = (self.tokenizer, self._generation_config())
        found = (getattr(source, "pad_token_id", None) for source in sources)
        return next((token for token in found if isinstance(token, int)), None)


def eos_token_ids(model: Any, tokenizer: Any = None) -> tuple[int, ...]:
    """The ids that end a text, from the model's generation config, else its config, else the
    tokenizer.
    """
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is None:
            continue
        try:
            found = [operator.index(token) for token in np.atleast_1d(np.asarray(ids))]
        except (TypeError, ValueError):
            raise UserError(
                f"eos_token_id of the {type(source).__name__} is {reprlib.repr(ids)}; accepted: "
                "a token id, or a list of token ids"
            ) from None
        return tuple(token for token in found if token >= 0)  # a negative one is never met
    return ()
