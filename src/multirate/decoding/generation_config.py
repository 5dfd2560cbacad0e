"""What a model's generation_config asks for, as SamplingSettings, and which fields multirate
ignores.

Fields mean what they mean to transformers' `generate`; its own logits processors implement what
SamplingSettings has no field for.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from multirate.decoding.logits import Processor, SamplingSettings
from multirate.errors import UserError, first_line, say_once

WHERE = "the model's generation_config"
_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_DEFAULT_TOP_K = 50
"""transformers' default when sampling without top_k."""
_PROCESSED = {
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
"""Fields that transformers' processors implement, with the value that changes nothing."""
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
"""Fields that change the text and that only transformers implements (_SAMPLED: when sampling)."""


def sampling_of(
    config: Any, ends: Sequence[int], vocabulary: int, device: torch.device, given: dict[str, Any]
) -> SamplingSettings:
    """The settings that a generation_config (or None) asks for, with the fields `given` replaced.
    ends: the ids that end a text.

    Raises UserError naming a field that cannot be used.
    """
    values = {name: getattr(config, name, None) for name in _FIELDS}
    if samples(config):
        values = {"temperature": 1.0, "top_k": _DEFAULT_TOP_K} | _set(values)
    else:
        values["temperature"] = None
    processors = _processors(config, ends, vocabulary, device)
    try:
        asked = SamplingSettings(**_set(values), processors=processors)
    except UserError as error:
        raise UserError(f"{WHERE}: {error}") from None
    fields = (*_FIELDS, "processors")
    return SamplingSettings(**{name: getattr(asked, name) for name in fields} | given)


def samples(config: Any) -> bool:
    """Whether it asks for sampling."""
    return bool(getattr(config, "do_sample", None))


def followed(config: Any) -> list[str]:
    """The settings in it that decide tokens or where a text ends, and that multirate follows, such
    as "repetition_penalty 1.1".
    """
    names = dict.fromkeys(("do_sample", *_FIELDS)) if samples(config) else {}
    return _asked(config, names | {"repetition_penalty": 1} | _PROCESSED | {"stop_strings": None})


def unfollowed(config: Any) -> list[str]:
    """The settings in it that only transformers follows."""
    return _asked(config, _UNFOLLOWED | (_SAMPLED if samples(config) else {}))


def left_out(config: Any, by: str = "") -> str | None:
    """The note for commands that decode the bare model greedily and ignore the config; None if it
    asks for nothing. by: a remark such as " with every method".
    """
    asked = ", ".join([*followed(config), *unfollowed(config)])
    said = f"{WHERE} asks for {asked}; multirate ignores it{by} and decodes the bare model"
    return said if asked else None


def stop_strings(config: Any) -> Sequence[str]:
    """Its stop strings. Raises UserError for anything else."""
    found = getattr(config, "stop_strings", None)
    found = (found,) if isinstance(found, str) else () if found is None else found
    texts = isinstance(found, (list, tuple)) and all(isinstance(one, str) and one for one in found)
    if not texts:
        raise UserError(
            f"{WHERE}: stop_strings is {reprlib.repr(found)}; accepted: non-empty strings"
        )
    return tuple(found)


def new_tokens(config: Any, longest_prompt: int, otherwise: int) -> int:
    """The maximum number of new tokens: its max_new_tokens, else what its max_length leaves, else
    `otherwise`. Raises UserError naming a field that cannot be used.
    """
    for name, taken in (("max_new_tokens", -1), ("max_length", longest_prompt)):
        value = getattr(config, name, None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(f"{WHERE}: {name} is {value!r}; accepted: a whole number")
        if value > taken:
            return value - max(taken, 0)
        say_once(
            f"ignoring {name} {value} in {WHERE}: a prompt of {taken} tokens leaves no room "
            "within it"
        )
    return otherwise


def _set(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _asked(config: Any, neutral: dict[str, Any]) -> list[str]:
    found = []
    for name, nothing in neutral.items():
        value = getattr(config, name, None)
        if not _asks(value, nothing):
            continue
        short = isinstance(value, (int, float)) and not isinstance(value, bool)
        found.append(f"{name} {value:g}" if short else name)
    return found


def _asks(value: Any, nothing: Any) -> bool:
    """Whether a field's value has an effect. As in transformers, a number below 0 has none if 0 has
    none.
    """
    if value is None or value is False:
        return False
    if isinstance(value, (int, float)):
        return bool(value != nothing) and not (nothing == 0 and value < 0)
    return not hasattr(value, "__len__") or len(value) > 0


def _processors(
    config: Any, ends: Sequence[int], vocabulary: int, device: torch.device
) -> Callable[[int], Sequence[Processor]] | None:
    """The processors by prompt length; None if there are none. They run once here, because some
    check their values only when called.
    """
    if not _asked(config, _PROCESSED):
        return None

    @lru_cache(maxsize=64)
    def of_length(prompt: int) -> list[Processor]:
        return _transformers_own(config, prompt, ends, device)

    scores = torch.zeros(1, vocabulary, dtype=torch.float32, device=device)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    for processor in of_length(1):
        processor(ids, scores)
    return of_length


def _transformers_own(
    config: Any, prompt: int, ends: Sequence[int], device: torch.device
) -> list[Processor]:
    """In the order in which `generate` applies them."""
    on = str(device)
    ending = torch.tensor(list(ends), dtype=torch.int64, device=device) if ends else None
    makers: dict[str, Callable[[Any], Processor]] = {
        "no_repeat_ngram_size": theirs.NoRepeatNGramLogitsProcessor,
        "bad_words_ids": lambda words: theirs.NoBadWordsLogitsProcessor(words, ending),
    }
    if ending is not None:
        makers |= {
            "min_length": lambda least: theirs.MinLengthLogitsProcessor(least, ending, device=on),
            "min_new_tokens": lambda least: theirs.MinNewTokensLengthLogitsProcessor(
                prompt, least, ending, device=on
            ),
            "exponential_decay_length_penalty": lambda decay: theirs.ExponentialDecayLengthPenalty(
                tuple(decay), ending, prompt
            ),
        }
    makers |= {
        "suppress_tokens": lambda tokens: theirs.SuppressTokensLogitsProcessor(tokens, device=on),
        "begin_suppress_tokens": lambda tokens: theirs.SuppressTokensAtBeginLogitsProcessor(
            tokens, prompt, device=on
        ),
    }
    return [
        _following(name, value, make)
        for name, make in makers.items()
        if _asks(value := getattr(config, name, None), _PROCESSED[name])
    ]


def _following(name: str, value: Any, make: Callable[[Any], Processor]) -> Processor:
    """The processor of a field. It raises UserError, and so does making it, where the value is none
    that it can work with: some find out only after some tokens.
    """

    def attempt(what: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return what(*arguments)
        except Exception as error:  # whatever a value that is none makes it raise
            raise UserError(
                f"{WHERE}: {name} is {reprlib.repr(value)} and cannot be applied: "
                f"{first_line(error)}"
            ) from error

    processor = attempt(make, value)

    def process(ids: Tensor, scores: Tensor) -> Tensor:
        found: Tensor = attempt(processor, ids, scores)
        return found

    return process
