"""`custom_generate` for `model.generate(**inputs, custom_generate=...)` of transformers."""

from __future__ import annotations

import copy
import inspect
import os
import sys
import warnings
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateDecoderOnlyOutput

from multirate.engine import check_mode
from multirate.errors import Notice, UserError, first_line
from multirate.integration.caller import argument_of_generate
from multirate.integration.engines import drop_engines, engine_of
from multirate.integration.model_state import RandomState, check_model
from multirate.integration.settings import (
    CACHE_NAMES,
    Request,
    Unsupported,
    check_autocast,
    read_request,
)
from multirate.methods import spec
from multirate.runtime.decoder import DecoderInfo
from multirate.runtime.load import BACKENDS
from multirate.runtime.quantised import runnable
from multirate.training.checkpoint import Accelerator


@dataclass(eq=False, repr=False)
class CustomGenerate:
    """Makes transformers' `generate` use multirate, with one argument:

        model.generate(**inputs, custom_generate=multirate.custom_generate())

        # with a trained accelerator
        speed_up = multirate.custom_generate("path/to/accelerator")
        model.generate(**inputs, custom_generate=speed_up)

    The first call packs the model's weights and stores them on the model for later calls. Raises
    UserError for values that no call could use.

    It decodes what transformers has prepared: greedy decoding and sampling (temperature, top-k,
    top-p, min-p, repetition penalty), EOS ids, length limits, stop strings, left-padded batches and
    streamers.

    Everything else runs in the model's own loop, as transformers prepared it, with a warning that
    gives the reason: other arguments (beams, other logits processors or stopping criteria, scores
    …), unsupported models, hooks, dropout, an accelerator that does not fit, and unforeseen errors.
    If an error comes after the first streamed token, the model's own loop continues greedy text;
    any other call raises the error.

    In lossless mode the output equals that of the call without multirate: in float32 always, in
    lower precision unless two tokens are about equally likely (docs/lossless.md has the table). In
    bfloat16 the kernel and transformers round in different places, but drafts never change the
    kernel's text. If drafts could change the text, speculate="auto" makes none, and a warning says
    so.
    """

    accelerator: str | os.PathLike[str] | Accelerator | None = None
    """Its folder, hub id or name; None: a method that needs no training."""
    _: KW_ONLY
    method: str | None = None
    """This and the next four: as in `multirate.attach` and `Engine.generate`."""
    backend: str = "auto"
    speculate: str = "auto"
    mode: str = "lossless"
    quality: float | None = None
    tokenizer: Any = None
    """Needed for stop strings if you do not pass one to `generate`."""
    streamer: Any = None
    """A streamer of transformers, if you do not pass one to `generate`."""

    def __post_init__(self) -> None:
        accelerator, method = self.accelerator, self.method
        if not isinstance(accelerator, (str, os.PathLike, Accelerator, type(None))):
            raise UserError(
                f"the accelerator is {accelerator!r}; accepted: its folder, name or hub id"
            )
        if method is not None:
            if not isinstance(method, str):
                raise UserError(f"method is {method!r}; accepted: a str")
            spec.find(spec.parse_variant(method)[0])
        if self.backend not in BACKENDS:
            raise UserError(f"backend={self.backend!r} is unknown; accepted: {', '.join(BACKENDS)}")
        check_mode(self.mode, self.quality, self.speculate)

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
        returns it. Called by transformers.
        """
        if generation_config is None:
            raise UserError(
                "transformers calls custom_generate; use model.generate(..., custom_generate=...)"
            )
        streamer = (
            self.streamer or model_kwargs.pop("streamer", None) or argument_of_generate("streamer")
        )
        model_kwargs.pop("streamer", None)
        if argument_of_generate("synced_gpus"):
            model_kwargs["synced_gpus"] = True
        loop = _OwnLoop(
            model, logits_processor, stopping_criteria, generation_config, model_kwargs, streamer
        )
        stream, before = _Stream(streamer), RandomState(model)
        try:
            try:
                sequences = self._decode(input_ids, stream, loop)
            except Exception as error:
                greedy = not generation_config.do_sample and self.mode == "lossless"
                if stream.failed or loop.went_on or (stream.tokens and not greedy):
                    raise
                reason = error
            else:
                return loop.result(sequences)
            before.restore()
            if not isinstance(reason, (Unsupported, UserError)):
                drop_engines(model)  # what they hold may be half done
            _warn_of(reason, stacklevel=3)
            if not stream.tokens:
                return loop.run(input_ids)
            tokens = [*stream.tokens, *loop.go_on(input_ids[0], stream.tokens, 0)]
            return loop.result(torch.cat([input_ids, input_ids.new_tensor([tokens])], dim=1))
        except BaseException:
            if streamer is not None:  # whoever waits for the text would wait for ever
                streamer.end()
            raise

    def _decode(self, input_ids: torch.Tensor, stream: _Stream, loop: _OwnLoop) -> torch.Tensor:
        """input_ids [B, T] → [B, T + n]. If it raises, nothing of the call has changed."""
        check_autocast(loop.model)
        request = loop.request(input_ids)
        if stream and len(request.prompts) > 1:
            raise Unsupported(f"a streamer for {len(request.prompts)} sequences")
        check_model(loop.model)
        engine = engine_of(loop.model, self.accelerator, self.backend)
        _check_context(request, engine.decoder.info)
        masks = [[1] * len(prompt) for prompt in request.prompts]  # padding is left out already
        output = engine.generate(
            {"input_ids": request.prompts, "attention_mask": masks},
            request.sampling,
            request.stop,
            method=self.method,
            on_tokens=stream.put if stream else None,
            speculate=self.speculate,
            mode=self.mode,
            quality=self.quality,
        )
        cut = [row for row, reason in enumerate(output.finish_reasons) if reason == "context"]
        if engine.decoder.pass_dependent is not None and engine.notice and not cut:
            warnings.warn(f"multirate: {engine.notice}", Notice, stacklevel=4)
        if cut:
            warnings.warn(
                "multirate does not speed up the rest of this call: generation beyond "
                f"{_short(engine.decoder.info)} is left to the model's own generate",
                stacklevel=4,
            )
        for row in cut:
            output.sequences[row] += loop.go_on(input_ids[row], output.sequences[row], row)
        if not cut:
            stream.end()
        longest = max((len(tokens) for tokens in output.sequences), default=0)
        new = torch.full(
            (input_ids.shape[0], longest), request.pad_token_id, dtype=input_ids.dtype, device="cpu"
        )
        for row, tokens in enumerate(output.sequences):
            new[row, : len(tokens)] = torch.tensor(tokens, dtype=input_ids.dtype, device="cpu")
        return torch.cat([input_ids, new.to(input_ids.device)], dim=1)


def _warn_of(reason: Exception, stacklevel: int) -> None:
    """Warns, in one line, why the model's own loop runs."""
    what = "multirate does not speed up this call"
    if isinstance(reason, Unsupported):
        line = f"{what}: {reason} is left to the model's own generate"
    elif isinstance(reason, UserError):
        line = f"{what} and uses the model's own generate: {reason}"
    else:
        line = f"{what} because of an internal error and uses the model's own generate: "
        line += first_line(reason)
    warnings.warn(line, stacklevel=stacklevel + 1)


class _Stream:
    """The caller's streamer, if any, and the tokens it has received."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self.tokens: list[int] = []
        self.failed = False
        """Whether the streamer itself raised an error, which is the caller's."""

    def __bool__(self) -> bool:
        return self._streamer is not None

    def put(self, _: int, tokens: list[int]) -> None:
        """The new tokens of the one sequence that there is."""
        for token in tokens:
            self.tokens.append(token)
            self._call(self._streamer.put, torch.tensor([token], dtype=torch.int64, device="cpu"))

    def end(self) -> None:
        """The text is complete."""
        if self:
            self._call(self._streamer.end)

    def _call(self, function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException:
            self.failed = True
            raise


def _check_context(request: Request, info: DecoderInfo) -> None:
    longest, limit = max(len(prompt) for prompt in request.prompts), info.max_positions
    if limit is not None and longest >= limit:
        raise Unsupported(f"a prompt of {longest} tokens (beyond {_short(info)})")


def _short(info: DecoderInfo) -> str:
    """The limit without what `model.generate` does beyond it, because that loop continues here."""
    return info.context.partition(":")[0]


class _OwnLoop:
    """The model's own decoding loop, with what transformers prepared for this call."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        criteria: Any,
        config: Any,
        arguments: dict[str, Any],
        streamer: Any,
    ) -> None:
        self.model = model
        self._processor, self._criteria, self._config = processor, criteria, config
        self._arguments, self._streamer = arguments, streamer
        self.went_on = False
        """Whether it was asked for the rest of a text: what it raises then is the call's error."""

    def request(self, input_ids: torch.Tensor) -> Request:
        """The call in multirate's terms. Raises Unsupported for what only the loop can do."""
        return read_request(
            input_ids, self._config, self._processor or [], self._criteria or [], self._arguments
        )

    def result(self, sequences: torch.Tensor) -> Any:
        """The call's return value for these sequences."""
        if self._config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def run(self, input_ids: torch.Tensor, **changes: Any) -> Any:
        """input_ids [B, T] → the loop's result; it ends the streamer. changes: replaced
        arguments.
        """
        mode = self._config.get_generation_mode()
        loop = getattr(type(self.model), GENERATION_MODES_MAPPING.get(mode, ""), None)
        if loop is None:  # a mode that lives in a repository of its own
            raise UserError(f"{mode.value} cannot be combined with custom_generate")
        if self._streamer is not None and mode == GenerationMode.BEAM_SEARCH:
            raise UserError("a streamer cannot be used with beam search")
        arguments = {**self._arguments, **changes}
        if self._streamer is not None:
            arguments["streamer"] = self._streamer
        return loop(
            runnable(self.model),
            input_ids,
            logits_processor=self._processor,
            stopping_criteria=self._criteria,
            generation_config=self._config,
            **arguments,
        )

    def go_on(self, prompt: torch.Tensor, tokens: list[int], row: int) -> list[int]:
        """The tokens after `tokens` in row `row`, whose (padded) prompt is [T]. Ends the
        streamer.
        """
        ids = torch.cat([prompt, torch.tensor(tokens, dtype=prompt.dtype, device=prompt.device)])[
            None
        ]
        if self._criteria and bool(self._criteria(ids, None).all()):  # that was all
            if self._streamer is not None:
                self._streamer.end()
            return []
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
            self.model, processors, self._criteria, config, self._arguments, self._streamer
        )
        self.went_on = True
        return [int(token) for token in one.run(ids, **given)[0, ids.shape[1] :]]


def _of_row(processor: Any, row: int) -> Any:
    """A logits processor for one row of its batch; a repetition penalty counts each row's
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
        tokenizer = callable_.tokenizer if given is None else given
        if tokenizer is not None:
            left["tokenizer"] = tokenizer


custom_generate = CustomGenerate
_SIGNATURE = inspect.signature(CustomGenerate.__call__)
