"""What a model's generation_config asks for, as our settings, and what of it is not followed.

Fields mean what they mean to transformers' `generate`; its own logits processors do what
SamplingSettings has no field for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers.generation import logits_process as theirs

from multirate.decoding.logits import Processor, SamplingSettings
from multirate.errors import UserError, first_line, say_once

WHERE = "the model's generation_config"
_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_DEFAULT_TOP_K = 50
"""Of transformers, where sampling is asked for and top_k is not set."""
_PROCESSED = {
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
"""Fields that transformers' processors do, with the value that changes nothing."""
_SAMPLED = {"top_h": None, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}
_UNFOLLOWED = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "guidance_scale": 1,
    "sequence_bias": None,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "forced_eos_token_id": None,
    "watermarking_config": None,
    "token_healing": False,
    "constraints": None,
    "force_words_ids": None,
    "max_time": None,
}
"""Fields that change the text and that only transformers follows (_SAMPLED: where it samples)."""


def sampling_of(
    config: Any, ends: Sequence[int], vocabulary: int, device: torch.device, given: dict[str, Any]
) -> SamplingSettings:
    """The settings that a generation_config (or None) asks for, with the fields `given` in place of
    its own. ends: the ids that end a text.

    Raises UserError naming the field that cannot be used.
    """
    values = {name: getattr(config, name, None) for name in _FIELDS}
    if samples(config):
        values = {"temperature": 1.0, "top_k": _DEFAULT_TOP_K} | _set(values)
    else:
        values["temperature"] = None
    try:
        asked = SamplingSettings(
            **_set(values), processors=_processors(config, ends, vocabulary, device)
        )
    except UserError as error:
        raise UserError(f"{WHERE}: {error}") from None
    fields = (*_FIELDS, "processors")
    return SamplingSettings(**{name: getattr(asked, name) for name in fields} | given)


def samples(config: Any) -> bool:
    """Whether it asks for sampling."""
    return bool(getattr(config, "do_sample", None))


def followed(config: Any) -> list[str]:
    """What it asks for and is followed, such as "repetition_penalty 1.1", as far as it decides
    tokens.
    """
    names = dict.fromkeys(("do_sample", *_FIELDS)) if samples(config) else {}
    return _asked(config, names | {"repetition_penalty": 1} | _PROCESSED)


def unfollowed(config: Any) -> list[str]:
    """What it asks for and only transformers follows."""
    return _asked(config, _UNFOLLOWED | (_SAMPLED if samples(config) else {}))


def new_tokens(config: Any, longest_prompt: int, otherwise: int) -> int:
    """The most new tokens: its max_new_tokens, else what its max_length leaves, else `otherwise`.
    Raises UserError naming a field that cannot be used.
    """
    for name, taken in (("max_new_tokens", -1), ("max_length", longest_prompt)):
        value = getattr(config, name, None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(f"{WHERE}: {name} is {value!r}; accepted is a whole number")
        if value > taken:
            return value - max(taken, 0)
        say_once(
            f"{WHERE} has {name} {value}, which is not followed: a prompt of {taken} tokens leaves "
            "nothing of it"
        )
    return otherwise


def _set(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _asked(config: Any, neutral: dict[str, Any]) -> list[str]:
    found = []
    for name, nothing in neutral.items():
        value = getattr(config, name, None)
        if value is None or value is False or value == nothing or value in ([], {}, ()):
            continue
        short = isinstance(value, (int, float)) and not isinstance(value, bool)
        found.append(f"{name} {value:g}" if short else name)
    return found


def _processors(
    config: Any, ends: Sequence[int], vocabulary: int, device: torch.device
) -> Callable[[int], Sequence[Processor]] | None:
    """The processors of a prompt by its length; None where there are none. They are tried here, as
    some look at their values when they are first called.
    """
    if not _asked(config, _PROCESSED):
        return None

    @lru_cache(maxsize=64)
    def of_length(prompt: int) -> list[Processor]:
        return _transformers_own(config, prompt, ends, device)

    scores = torch.zeros(1, vocabulary, dtype=torch.float32, device=device)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        for processor in of_length(1):
            processor(ids, scores)
    except Exception as error:  # whatever a value that is none makes them raise
        raise UserError(first_line(error)) from error
    return of_length


def _transformers_own(
    config: Any, prompt: int, ends: Sequence[int], device: torch.device
) -> list[Processor]:
    """In the order in which `generate` applies them."""

    def asked(name: str) -> Any:
        value = getattr(config, name, None)
        return None if value in (None, 0, [], ()) else value

    ending = torch.tensor(list(ends), dtype=torch.int64, device=device) if ends else None
    found: list[Processor] = []
    if (size := asked("no_repeat_ngram_size")) is not None:
        found.append(theirs.NoRepeatNGramLogitsProcessor(size))
    if (words := asked("bad_words_ids")) is not None:
        found.append(theirs.NoBadWordsLogitsProcessor(words, ending))
    if ending is not None:
        if (least := asked("min_length")) is not None:
            found.append(theirs.MinLengthLogitsProcessor(least, ending, device=str(device)))
        if (least := asked("min_new_tokens")) is not None:
            found.append(
                theirs.MinNewTokensLengthLogitsProcessor(prompt, least, ending, device=str(device))
            )
        if (decay := asked("exponential_decay_length_penalty")) is not None:
            found.append(theirs.ExponentialDecayLengthPenalty(tuple(decay), ending, prompt))
    if (tokens := asked("suppress_tokens")) is not None:
        found.append(theirs.SuppressTokensLogitsProcessor(tokens, device=str(device)))
    if (tokens := asked("begin_suppress_tokens")) is not None:
        found.append(
            theirs.SuppressTokensAtBeginLogitsProcessor(tokens, prompt, device=str(device))
        )
    return found
