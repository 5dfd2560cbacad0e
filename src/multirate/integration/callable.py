"""The callable for `model.generate(**inputs, custom_generate=...)`."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateDecoderOnlyOutput

from multirate.errors import UserError
from multirate.integration.caller import argument_of_generate
from multirate.integration.engines import engine_of
from multirate.integration.settings import Request, Unsupported, read_request

if TYPE_CHECKING:
    from multirate.training.checkpoint import Accelerator


def custom_generate(
    accelerator: str | os.PathLike[str] | Accelerator | None = None,
    *,
    method: str | None = None,
    backend: str = "auto",
    speculate: str = "auto",
    tokenizer: Any = None,
    streamer: Any = None,
) -> CustomGenerate:
    """`model.generate(**inputs, custom_generate=multirate.custom_generate("path/to/accelerator"))`.

    The other arguments are those of `multirate.attach` and `Engine.generate`; `tokenizer` is needed with stop strings
    only. The first call packs the model's weights; they are kept on the model for the calls that follow.
    """
    return CustomGenerate(accelerator, method, backend, speculate, tokenizer, streamer)


class CustomGenerate:
    """Decodes what transformers has prepared. It honours greedy decoding and sampling (temperature, top-k, top-p,
    min-p, repetition penalty), EOS ids, length limits, stop strings, left-padded batches and streamers.

    Anything else a call asks for (beams, other logits processors or stopping criteria, scores …) goes to the model's
    own loop with a warning that names it: the output is never another one than without us.
    """

    def __init__(
        self,
        accelerator: str | os.PathLike[str] | Accelerator | None,
        method: str | None,
        backend: str,
        speculate: str,
        tokenizer: Any,
        streamer: Any,
    ) -> None:
        self._accelerator = accelerator
        self._method = method
        self._backend = backend
        self._speculate = speculate
        self._tokenizer = tokenizer
        self._streamer = streamer

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """input_ids [B, T] → [B, T + n], padded on the right, as transformers' own `generate` returns it."""
        if generation_config is None:
            raise UserError("custom_generate is called by transformers: use model.generate(..., custom_generate=...)")
        streamer = self._streamer or model_kwargs.get("streamer") or argument_of_generate("streamer")
        tokenizer = self._tokenizer
        try:
            request = read_request(
                input_ids, generation_config, logits_processor or [], stopping_criteria or [], model_kwargs, tokenizer
            )
        except Unsupported as reason:
            warnings.warn(
                f"multirate does not speed up this call: {reason} is left to the model's own generate", stacklevel=3
            )
            if streamer is not None:
                model_kwargs["streamer"] = streamer
            return self._own_loop(
                model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
            )
        sequences = self._decode(model, input_ids, request, streamer)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def _decode(self, model: Any, input_ids: torch.Tensor, request: Request, streamer: Any) -> torch.Tensor:
        if streamer is not None and len(request.prompts) > 1:
            raise UserError(f"a streamer takes one sequence, this call has {len(request.prompts)}")

        def stream(_: int, tokens: list[int]) -> None:
            for token in tokens:
                streamer.put(torch.tensor([token]))

        engine = engine_of(model, self._accelerator, self._backend)
        output = engine.generate(
            request.prompts,
            request.sampling,
            request.stop,
            method=self._method,
            on_tokens=None if streamer is None else stream,
            speculate=self._speculate,
        )
        if streamer is not None:
            streamer.end()
        if "context" in output.finish_reasons:
            warnings.warn(
                "generation ended at the model's context limit, before the length that was asked for", stacklevel=4
            )
        longest = max((len(tokens) for tokens in output.sequences), default=0)
        new = torch.full((input_ids.shape[0], longest), request.pad_token_id, dtype=input_ids.dtype)
        for row, tokens in enumerate(output.sequences):
            new[row, : len(tokens)] = torch.tensor(tokens, dtype=input_ids.dtype)
        return torch.cat([input_ids, new.to(input_ids.device)], dim=1)

    @staticmethod
    def _own_loop(
        model: Any, input_ids: torch.Tensor, processor: Any, criteria: Any, config: Any, kwargs: dict[str, Any]
    ) -> Any:
        name = GENERATION_MODES_MAPPING.get(config.get_generation_mode(), "")
        loop = getattr(type(model), name, None)
        if loop is None:  # a mode that lives in a repository of its own
            raise UserError(f"{config.get_generation_mode().value} cannot be combined with custom_generate")
        return loop(
            model,
            input_ids,
            logits_processor=processor,
            stopping_criteria=criteria,
            generation_config=config,
            **kwargs,
        )
