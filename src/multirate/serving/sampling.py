"""From a body's fields to how tokens are chosen and where an answer ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from multirate.decoding.logits import Processor, SamplingSettings
from multirate.decoding.stopping import StopSettings
from multirate.serving.bodies import Prediction, Sampled, Speculative
from multirate.serving.constraints import Constrained, Constraint
from multirate.serving.errors import ApiError
from multirate.serving.model import ServedModel
from multirate.serving.parts import THOUGHT, begins_thinking
from multirate.serving.settings import HttpSettings

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
MOST_BIAS = 100.0


def stop_strings(body: Sampled, settings: HttpSettings) -> tuple[str, ...]:
    """The body's. Raises ApiError for too many, for long ones and for an empty one."""
    given = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(given) > settings.max_stops:
        raise ApiError(f"stop has {len(given)} texts; accepted: {settings.max_stops}", "stop")
    longest = max(map(len, given), default=0)
    if longest > settings.max_stop_length:
        most = settings.max_stop_length
        raise ApiError(f"stop has a text of {longest} characters; accepted: {most}", "stop")
    if "" in given:
        raise ApiError("stop has an empty text; accepted: texts of at least one character", "stop")
    return tuple(given)


def most_tokens(asked: int | None, name: str, settings: HttpSettings) -> int | None:
    """How many tokens an answer may have; None: what the context leaves. Raises ApiError for more
    than the server allows.
    """
    if asked is not None and settings.max_tokens is not None and asked > settings.max_tokens:
        raise ApiError(f"{name} is {asked}; accepted: at most {settings.max_tokens}", name)
    return settings.max_tokens if asked is None else asked


def stopping(
    model: ServedModel, strings: Sequence[str], most: int | None, ignore_eos: bool = False
) -> StopSettings:
    """When an answer ends. Stop strings of the body come on top of the model's own."""
    if most is None and model.context is None:
        raise ApiError("this model's context has no limit, so max_tokens is needed", "max_tokens")
    return StopSettings(
        max_new_tokens=most,
        eos_token_ids=() if ignore_eos else model.ends,
        stop_strings=(*model.stop_strings, *strings),
        decode=model.tokenizer.decode,
        context_limit=model.context,
    )


def drafting(asked: Speculative | None, model: ServedModel) -> dict[str, Any]:
    """The fields of a Request that say how it drafts. Raises ApiError for another method than the
    server's.
    """
    if asked is None:
        return {}
    if asked.method not in (None, "none", model.method):
        raise ApiError(
            f"speculative.method is {asked.method[:100]!r}; accepted: {model.method}, or none for "
            "no drafts",
            "speculative",
        )
    return {"speculate": asked.method != "none", "most_drafted": asked.n_max}


def predicted(asked: Prediction | None, model: ServedModel) -> list[int]:
    """The tokens that the client expects. Raises ApiError for what is no text."""
    return [] if asked is None else model.encode(text_of(asked.content, "prediction"), False)


def text_of(content: str | list[dict[str, Any]] | None, param: str) -> str:
    """The text of a message's content: a text, or parts of type text. Raises ApiError for other
    parts.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        kind, text = part.get("type"), part.get("text")
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            shown = str(kind)[:40]
            raise ApiError(f"{param} has a part of type {shown!r}; accepted: text", param)
        texts.append(text)
    return "".join(texts)


def constraint_of(body: Sampled) -> Constraint | None:
    """The form that the answer must have. Raises ApiError if several are asked for."""
    found = list(_constraints(body))
    if len(found) > 1:
        names = " and ".join(one.param for one in found)
        raise ApiError(f"{names} exclude each other: give one", found[1].param)
    return found[0] if found else None


def _constraints(body: Sampled) -> Sequence[Constraint]:
    found: list[Constraint] = []
    form = body.response_format
    if form is not None and form.type == "json_object":
        found.append(Constraint("json", {"type": "object"}, "response_format"))
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise ApiError("response_format.json_schema is missing", "response_format")
        found.append(Constraint("json", form.json_schema.schema_, "response_format"))
    given = body.structured_outputs
    for schema, regex, choice, grammar, prefix in (
        (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar, "guided_"),
        *(
            [(given.json_, given.regex, given.choice, given.grammar, "structured_outputs.")]
            if given is not None
            else []
        ),
    ):
        if schema is not None:
            found.append(Constraint("json", schema, f"{prefix}json"))
        if regex is not None:
            found.append(Constraint("regex", regex, f"{prefix}regex"))
        if choice is not None:
            found.append(Constraint.choice(choice, f"{prefix}choice"))
        if grammar is not None:
            found.append(Constraint("lark", grammar, f"{prefix}grammar"))
    return found


class Choosing:
    """How the tokens of one body's answers are chosen."""

    def __init__(
        self, body: Sampled, model: ServedModel, constraint: Constraint | None = None
    ) -> None:
        """Raises ApiError, or UserError, for a value that cannot be used."""
        given = {name: value for name in _FIELDS if (value := getattr(body, name)) is not None}
        if given.get("top_k") == -1:  # vLLM's way to say all
            given["top_k"] = 0
        self._model = model
        self._own = model.sampling(**given)
        self._bias = _bias(body.logit_bias, model)
        self._frequency = body.frequency_penalty or 0.0
        self._presence = body.presence_penalty or 0.0
        self._matcher = None if constraint is None else model.grammars.matcher(constraint)

    def settings(self, prompt: Sequence[int]) -> SamplingSettings:
        """Those of one answer: a grammar's processor remembers where the answer is."""
        more: list[Processor] = []
        if self._bias is not None:
            more.append(self._bias)
        if self._frequency or self._presence:
            more.append(_Penalties(len(prompt), self._frequency, self._presence))
        forced = None
        if self._matcher is not None:
            after = self._end_of_thought(prompt)
            constrained = Constrained(self._matcher.deep_copy(), len(prompt), after)
            more.append(constrained)
            forced = constrained.forced
        if not more:
            return self._own
        fields = {name: getattr(self._own, name) for name in (*_FIELDS,)}
        processors = _chained(self._own.processors, more)
        return SamplingSettings(**fields, processors=processors, forced=forced)

    def _end_of_thought(self, prompt: Sequence[int]) -> int | None:
        """The token after which a grammar begins, where the prompt opens a thought."""
        tokenizer = self._model.tokenizer
        if not begins_thinking(tokenizer, list(prompt)):
            return None
        token = tokenizer.convert_tokens_to_ids(THOUGHT)
        return None if token == tokenizer.unk_token_id else token


def _chained(
    first: Callable[[int], Sequence[Processor]] | None, more: Sequence[Processor]
) -> Callable[[int], Sequence[Processor]]:
    def processors(prompt: int) -> Sequence[Processor]:
        return [*(first(prompt) if first is not None else ()), *more]

    return processors


def _bias(given: dict[str, float] | None, model: ServedModel) -> Processor | None:
    if not given:
        return None
    ids, values = [], []
    for name, value in given.items():
        if not name.isascii() or not name.isdigit():
            raise ApiError(
                f'logit_bias has {name[:20]!r}; accepted: token ids as texts, such as "50"',
                "logit_bias",
            )
        if not -MOST_BIAS <= value <= MOST_BIAS:
            raise ApiError(
                f"logit_bias of token {name[:20]} is {value}; accepted: -100 to 100", "logit_bias"
            )
        ids.append(int(name[:20]))
        values.append(value)
    model.check_ids(ids, "logit_bias")
    places = torch.tensor(ids, dtype=torch.int64, device="cpu")
    amounts = torch.tensor(values, dtype=torch.float32, device="cpu")

    def add(_: Tensor, scores: Tensor) -> Tensor:
        more = amounts.to(scores.device, scores.dtype)
        return scores.index_add(1, places.to(scores.device), more[None])

    return add


class _Penalties:
    """OpenAI's: the more often a token has been emitted, the less likely it becomes. The prompt
    does not count.
    """

    def __init__(self, prompt: int, frequency: float, presence: float) -> None:
        self._prompt, self._frequency, self._presence = prompt, frequency, presence

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        width = scores.shape[-1]
        new = ids[0, self._prompt :]
        counts = torch.bincount(new[new < width], minlength=width)
        return scores - self._frequency * counts - self._presence * (counts > 0)
