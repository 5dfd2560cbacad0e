"""The callable for `model.generate(**inputs, custom_generate=...)`."""

from __future__ import annotations

import copy
import inspect
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessorList
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateDecoderOnlyOutput

from multirate.errors import UserError
from multirate.integration.caller import argument_of_generate
from multirate.integration.engines import engine_of
from multirate.integration.settings import (
    CACHE_NAMES,
    Request,
    Unsupported,
    check_autocast,
    read_request,
)

if TYPE_CHECKING:
    from multirate.engine import Engine
    from multirate.training.checkpoint import Accelerator


def custom_generate(
    accelerator: str | os.PathLike[str] | Accelerator | None = None,
    *,
    method: str | None = None,
    backend: str = "auto",
    speculate: str = "auto",
    mode: str = "lossless",
    quality: float | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
) -> CustomGenerate:
    """`model.generate(**inputs, custom_generate=multirate.custom_generate("path/to/accelerator"))`.

    The other arguments are those of `multirate.attach` and `Engine.generate`; `tokenizer` is needed
    with stop strings only, where `generate` was not given one. The first call packs the model's
    weights; they are kept on the model for the calls that follow.
    """
    return CustomGenerate(
        accelerator, method, backend, speculate, tokenizer, streamer, mode, quality
    )


class CustomGenerate:
    """Decodes what transformers has prepared. It honours greedy decoding and sampling (temperature,
    top-k, top-p, min-p, repetition penalty), EOS ids, length limits, stop strings, left-padded
    batches and streamers.

    Anything else a call asks for (beams, other logits processors or stopping criteria, scores …)
    goes to the model's own loop with a warning that names it. In lossless mode the output is never
    another one than without us.
    """

    def __init__(
        self,
        accelerator: str | os.PathLike[str] | Accelerator | None,
        method: str | None,
        backend: str,
        speculate: str,
        tokenizer: Any,
        streamer: Any,
        mode: str = "lossless",
        quality: float | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._mode, self._quality = mode, quality
        self._method = method
        self._backend = backend
        self._speculate = speculate
        self._tokenizer = tokenizer
        self._streamer = streamer

    @property
    def __signature__(self) -> inspect.Signature:
        _restore_tokenizer(self)
        parameters = list(_SIGNATURE.parameters.values())
        return _SIGNATURE.replace(parameters=parameters[1:])

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """input_ids [B, T] → [B, T + n], padded on the right, as transformers' own `generate`
        returns it.
        """
        if generation_config is None:
            raise UserError(
                "custom_generate is called by transformers: use model.generate(..., "
                "custom_generate=...)"
            )
        streamer = (
            self._streamer or model_kwargs.pop("streamer", None) or argument_of_generate("streamer")
        )
        model_kwargs.pop("streamer", None)
        loop = _OwnLoop(
            model, logits_processor, stopping_criteria, generation_config, model_kwargs, streamer
        )
        try:
            try:
                check_autocast(model)
                request = read_request(
                    input_ids,
                    generation_config,
                    logits_processor or [],
                    stopping_criteria or [],
                    model_kwargs,
                )
                engine = engine_of(model, self._accelerator, self._backend)
                _check_context(request, engine.decoder.info.max_positions)
            except Unsupported as reason:
                warnings.warn(
                    f"multirate does not speed up this call: {reason} is left to the model's own "
                    "generate",
                    stacklevel=3,
                )
                return loop.run(input_ids)
            sequences = self._decode(engine, input_ids, request, streamer, loop)
        except BaseException:
            if streamer is not None:  # whoever waits for the text would wait for ever
                streamer.end()
            raise
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def _decode(
        self,
        engine: Engine,
        input_ids: torch.Tensor,
        request: Request,
        streamer: Any,
        loop: _OwnLoop,
    ) -> torch.Tensor:
        if streamer is not None and len(request.prompts) > 1:
            raise UserError(f"a streamer takes one sequence, this call has {len(request.prompts)}")

        def stream(_: int, tokens: list[int]) -> None:
            for token in tokens:
                streamer.put(torch.tensor([token], dtype=torch.int64, device="cpu"))

        output = engine.generate(
            request.prompts,
            request.sampling,
            request.stop,
            method=self._method,
            on_tokens=None if streamer is None else stream,
            speculate=self._speculate,
            mode=self._mode,
            quality=self._quality,
        )
        cut = [row for row, reason in enumerate(output.finish_reasons) if reason == "context"]
        if cut:
            warnings.warn(
                "multirate does not speed up the rest of this call: generation beyond the model's "
                "context limit of "
                f"{engine.decoder.info.max_positions} tokens is left to the model's own generate",
                stacklevel=4,
            )
        for row in cut:
            output.sequences[row] += loop.go_on(input_ids[row], output.sequences[row], row)
        if streamer is not None and not cut:
            streamer.end()
        longest = max((len(tokens) for tokens in output.sequences), default=0)
        new = torch.full(
            (input_ids.shape[0], longest), request.pad_token_id, dtype=input_ids.dtype, device="cpu"
        )
        for row, tokens in enumerate(output.sequences):
            new[row, : len(tokens)] = torch.tensor(tokens, dtype=input_ids.dtype, device="cpu")
        return torch.cat([input_ids, new.to(input_ids.device)], dim=1)


def _check_context(request: Request, limit: int | None) -> None:
    longest = max(len(prompt) for prompt in request.prompts)
    if limit is not None and longest >= limit:
        raise Unsupported(f"a prompt of {longest} tokens (the model's context is {limit})")


class _OwnLoop:
    """The model's own decoding loop with what transformers prepared for this call."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        criteria: Any,
        config: Any,
        arguments: dict[str, Any],
        streamer: Any,
    ) -> None:
        self._model, self._processor, self._criteria, self._config = (
            model,
            processor,
            criteria,
            config,
        )
        self._arguments, self._streamer = arguments, streamer

    def run(self, input_ids: torch.Tensor, **changes: Any) -> Any:
        """input_ids [B, T] → what the loop gives for them; it ends the streamer. changes: of its
        arguments.
        """
        mode = self._config.get_generation_mode()
        loop = getattr(type(self._model), GENERATION_MODES_MAPPING.get(mode, ""), None)
        if loop is None:  # a mode that lives in a repository of its own
            raise UserError(f"{mode.value} cannot be combined with custom_generate")
        arguments = {**self._arguments, **changes}
        if self._streamer is not None:
            arguments["streamer"] = self._streamer
        return loop(
            self._model,
            input_ids,
            logits_processor=self._processor,
            stopping_criteria=self._criteria,
            generation_config=self._config,
            **arguments,
        )

    def go_on(self, prompt: torch.Tensor, tokens: list[int], row: int) -> list[int]:
        """The tokens that follow `tokens` in row number `row`, whose (padded) prompt is [T]."""
        ids = torch.cat([prompt, torch.tensor(tokens, dtype=prompt.dtype, device=prompt.device)])[
            None
        ]
        mask = self._arguments.get("attention_mask")
        if mask is not None:
            mask = torch.cat([mask[row : row + 1], mask.new_ones(1, len(tokens))], dim=1)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        if mask is not None:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        config = copy.copy(self._config)
        config.return_dict_in_generate = False
        config._mask_length = ids.shape[1]
        changes = {"attention_mask": mask, "position_ids": positions, **dict.fromkeys(CACHE_NAMES)}
        given = {name: value for name, value in changes.items() if name in self._arguments}
        processors = LogitsProcessorList(
            [_of_row(processor, row) for processor in self._processor or []]
        )
        one = _OwnLoop(
            self._model, processors, self._criteria, config, self._arguments, self._streamer
        )
        return [int(token) for token in one.run(ids, **given)[0, ids.shape[1] :]]


def _of_row(processor: Any, row: int) -> Any:
    """A logits processor for one row of its batch: a repetition penalty counts each row's
    padding.
    """
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, torch.Tensor):
        return processor
    one = copy.copy(processor)
    one.prompt_ignore_length = ignored[row : row + 1]
    return one


def _restore_tokenizer(callable_: CustomGenerate) -> None:
    """Lets transformers make its stopping criterion of `stop_strings`: it takes the tokenizer out
    of a call's arguments before it asks which arguments a callable has, and then misses it.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "_extract_generation_mode_kwargs":
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return
    taken, left = frame.f_locals.get("generation_mode_kwargs"), frame.f_locals.get("kwargs")
    if isinstance(left, dict) and "tokenizer" not in left:
        given = taken.get("tokenizer") if isinstance(taken, dict) else None
        tokenizer = callable_._tokenizer if given is None else given
        if tokenizer is not None:
            left["tokenizer"] = tokenizer


_SIGNATURE = inspect.signature(CustomGenerate.__call__)
