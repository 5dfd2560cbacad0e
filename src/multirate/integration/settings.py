"""Reads what transformers prepared for a generation: our settings, or the reason why we cannot
honour it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria
from transformers.generation.configuration_utils import GenerationMode

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.stopping import StopSettings
from multirate.runtime.quantised import device_of

CACHE_NAMES = ("cache", "past_key_values")
"""What `generate` calls the key/value cache: from transformers 5.24 on, and before."""

# Arguments that describe the same generation to the model's own loop; what they hold is read
# elsewhere or is no matter.
_KNOWN_ARGUMENTS = {
    "attention_mask",
    "position_ids",
    "cache_position",
    *CACHE_NAMES,
    "use_cache",
    "logits_to_keep",
    "synced_gpus",
    "streamer",
    "cache_implementation",
}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# Processor → (our field, its attribute, type), in the order in which both pipelines apply them;
# another order would be another distribution.
_FIELDS: dict[type, tuple[str, str, type]] = {
    processors.RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty", float),
    processors.TemperatureLogitsWarper: ("temperature", "temperature", float),
    processors.TopKLogitsWarper: ("top_k", "top_k", int),
    processors.TopPLogitsWarper: ("top_p", "top_p", float),
    processors.MinPLogitsWarper: ("min_p", "min_p", float),
}
_ORDER = list(_FIELDS)


class Unsupported(Exception):
    """Something this generation asks for that only the model's own loop does; the message names
    it.
    """


@dataclass(frozen=True)
class Request:
    """One `generate` call in our terms. prompts: token ids without padding."""

    prompts: list[list[int]]
    sampling: SamplingSettings
    stop: StopSettings
    pad_token_id: int


def read_request(
    input_ids: torch.Tensor,
    generation_config: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    arguments: dict[str, Any],
) -> Request:
    """input_ids [B, T] and what came with them → Request. Raises Unsupported."""
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise Unsupported(str(mode.value).replace("_", " "))
    for name in _OUTPUTS:
        if getattr(generation_config, name, None):
            raise Unsupported(name)
    for name, value in arguments.items():
        if name not in _KNOWN_ARGUMENTS and value is not None and value is not False:
            raise Unsupported(f"the argument {name}")
    if arguments.get("synced_gpus"):
        raise Unsupported("synced_gpus")
    for name in CACHE_NAMES:
        cache = arguments.get(name)
        if cache is not None and (getattr(cache, "_is_user_defined", False) or _filled(cache)):
            raise Unsupported(f"a {name} that you have already filled")
    mask = _mask(input_ids, arguments.get("attention_mask"), arguments.get("position_ids"))
    prompts = [row[keep].tolist() for row, keep in zip(input_ids.cpu(), mask, strict=True)]
    if not prompts or not all(prompts):
        raise Unsupported("an empty prompt, or a row of only padding")
    eos = generation_config._eos_token_tensor
    pad = generation_config._pad_token_tensor
    eos_ids = () if eos is None else tuple(int(token) for token in eos.reshape(-1))
    return Request(
        prompts=prompts,
        sampling=_sampling(generation_config, logits_processor, mask),
        stop=_stop(stopping_criteria, input_ids, eos_ids),
        pad_token_id=int(pad) if pad is not None else (eos_ids[0] if eos_ids else 0),
    )


def check_autocast(model: Any) -> None:
    """Unsupported where the caller's autocast computes in another dtype than the model's weights
    have: the text is another one there.
    """
    place = device_of(model).type
    if torch.is_autocast_enabled(place) and torch.get_autocast_dtype(place) != model.dtype:
        raise Unsupported(f"torch.autocast in {torch.get_autocast_dtype(place)}")


def _filled(cache: Any) -> bool:
    try:
        return bool(cache.get_seq_length() > 0)
    except ValueError:
        raise Unsupported(f"a {type(cache).__name__} of layers without attention") from None


def _mask(input_ids: torch.Tensor, attention_mask: Any, position_ids: Any) -> torch.Tensor:
    """[B, T] bool on the CPU: which ids are prompt. Padding must be on the left and positions count
    from its end.
    """
    if attention_mask is None:
        mask = torch.ones(input_ids.shape, dtype=torch.bool, device="cpu")
    else:
        mask = attention_mask.to("cpu", torch.bool)
        if mask.shape != input_ids.shape:
            raise Unsupported("an attention_mask of another shape than input_ids")
    if bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise Unsupported("an attention_mask other than left padding")
    if position_ids is not None:
        expected = mask.long().cumsum(-1) - 1
        given = position_ids.to("cpu")
        if given.shape[-1] != mask.shape[1] or bool(
            (given.expand_as(mask)[mask] != expected[mask]).any()
        ):
            raise Unsupported("position_ids of your own")
    return mask


def _sampling(config: Any, logits_processor: Any, mask: torch.Tensor) -> SamplingSettings:
    values: dict[str, Any] = {"temperature": 1.0 if config.do_sample else 0.0}
    last = -1
    for processor in logits_processor:
        kind = type(processor)
        if kind not in _ORDER:
            raise Unsupported(f"the logits processor {kind.__name__}")
        if _ORDER.index(kind) <= last:
            raise Unsupported(f"{kind.__name__} at this position among the logits processors")
        last = _ORDER.index(kind)
        if getattr(processor, "min_tokens_to_keep", 1) > 1:
            raise Unsupported("min_tokens_to_keep")
        if kind is processors.RepetitionPenaltyLogitsProcessor:
            _check_penalised_prompt(processor.prompt_ignore_length, mask)
        field, attribute, of = _FIELDS[kind]
        values[field] = of(getattr(processor, attribute))
    if not config.do_sample:
        # Warpers that a caller passes himself do not move the most probable token (temperature,
        # top-k, top-p, min-p).
        values = {"temperature": 0.0, "repetition_penalty": values.get("repetition_penalty", 1.0)}
    return SamplingSettings(**values)


def _check_penalised_prompt(ignored: Any, mask: torch.Tensor) -> None:
    """Our penalty counts the whole prompt and no padding; anything else would give other text."""
    if ignored is None:
        padded = bool((~mask).any())
        if padded:
            raise Unsupported("a repetition penalty that counts padding")
    elif isinstance(ignored, int):
        if ignored:
            raise Unsupported("a repetition penalty that ignores the prompt")
    elif bool((ignored.to("cpu") != (~mask).sum(-1)).any()):
        raise Unsupported("a repetition penalty that ignores part of the prompt")


def _stop(
    stopping_criteria: Any, input_ids: torch.Tensor, eos_ids: tuple[int, ...]
) -> StopSettings:
    limit: int | None = None
    strings: list[criteria.StopStringCriteria] = []
    ends = set(eos_ids)
    batch, padded_length = input_ids.shape
    for criterion in stopping_criteria:
        if type(criterion) is criteria.MaxLengthCriteria:
            room = max(0, int(criterion.max_length) - padded_length)
            limit = room if limit is None else min(limit, room)
        elif type(criterion) is criteria.EosTokenCriteria:
            ends.update(int(token) for token in criterion.eos_token_id.reshape(-1))
        elif type(criterion) is criteria.StopStringCriteria:
            strings.append(criterion)
        else:
            raise Unsupported(f"the stopping criterion {type(criterion).__name__}")
    if (
        strings
        and batch > 1
        and not any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    ):
        # There, transformers lets a row that has ended go on until all have.
        raise Unsupported("stop strings in a batch without an EOS id")
    return StopSettings(
        max_new_tokens=limit,
        eos_token_ids=tuple(
            sorted(token for token in ends if token >= 0)
        ),  # a negative one is never met
        ends=_ends(strings, input_ids) if strings else None,
    )


def _ends(
    strings: list[criteria.StopStringCriteria], input_ids: torch.Tensor
) -> Callable[[int, list[int]], bool]:
    """transformers' own matching of stop strings, which may begin in the prompt (padding included)
    and end in the last token. The criteria look at a row's last tokens only.
    """
    rows = input_ids.tolist()
    longest = max(criterion.maximum_token_len for criterion in strings)

    def ends(row: int, new: list[int]) -> bool:
        last = new[-longest:]
        if len(last) < longest:
            last = [*rows[row][len(last) - longest :], *last]
        ids = torch.tensor([last], dtype=torch.int64, device="cpu")
        return any(bool(criterion(ids, None)) for criterion in strings)

    return ends
