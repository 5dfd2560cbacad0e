"""What a saved accelerator's own folder, or its hub id, calls when passed as `custom_generate`."""

from __future__ import annotations

import copy
from typing import Any

from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from multirate.errors import UserError
from multirate.integration.callable import custom_generate
from multirate.integration.caller import argument_of_generate

_OURS = ("method", "backend", "speculate", "mode", "quality")


def generate_from_folder(model: Any, accelerator: str | None = None, **arguments: Any) -> Any:
    """Called by the folder's loader, with the arguments of `model.generate`.

    `accelerator` is the folder or hub id. None: the value that `generate` was called with. Raises
    UserError if there is none.
    """
    source = accelerator or argument_of_generate("custom_generate", str)
    if source is None:
        raise UserError(
            'no accelerator is named; call model.generate(..., custom_generate="<folder or hub '
            'id>", trust_remote_code=True)'
        )
    streamer = arguments.pop("streamer", None)
    tokenizer = arguments.pop("tokenizer", None)
    ours = {name: arguments.pop(name) for name in _OURS if name in arguments}
    _stop_strings_as_criterion(arguments, tokenizer)
    return model.generate(
        streamer=streamer,
        custom_generate=custom_generate(source, tokenizer=tokenizer, streamer=streamer, **ours),
        **arguments,
    )


def _stop_strings_as_criterion(arguments: dict[str, Any], tokenizer: Any) -> None:
    """transformers takes the tokenizer away from a callable and then misses it; a ready criterion
    needs none.
    """
    strings = arguments.pop("stop_strings", None)
    config = arguments.get("generation_config")
    if strings is None and config is not None and config.stop_strings is not None:
        strings = config.stop_strings
        arguments["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    if strings is None:
        return
    if tokenizer is None:
        raise UserError("stop_strings need the model's tokenizer; pass tokenizer=... to generate")
    given = list(arguments.get("stopping_criteria") or [])
    arguments["stopping_criteria"] = StoppingCriteriaList(
        [*given, StopStringCriteria(tokenizer, strings)]
    )
