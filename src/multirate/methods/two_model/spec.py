"""Registers two-model speculation."""

from __future__ import annotations

from typing import Any

from multirate.decoding.speculate.drafter import Drafter
from multirate.errors import UserError
from multirate.methods.spec import MethodSpec, SecondModel, register
from multirate.methods.two_model.decode import TwoModelConfig, TwoModelDrafter
from multirate.methods.two_model.tokenizers import check_same
from multirate.runtime.decoder import Decoder

_NAME = "two_model"


def _drafter(decoder: Decoder, second: Any, settings: TwoModelConfig) -> Drafter:
    if not isinstance(second, SecondModel):
        raise UserError(
            f"method {_NAME} needs a draft model; name one with {_NAME}:draft=MODEL, a folder, "
            "GGUF file or hub id with the base model's tokenizer"
        )
    check_same(second.tokenizer, second.base_tokenizer, second.name)
    return settings.joined(TwoModelDrafter(decoder, second.decoder, settings), decoder)


SPEC = register(
    MethodSpec(
        name="two_model",
        title="two-model speculation (arXiv 2211.17192, 2302.01318; no training)",
        summary="drafts with a smaller model that has the same tokenizer (draft=MODEL)",
        settings=TwoModelConfig,
        second_model=lambda settings: settings.draft,
        drafter=_drafter,
    )
)
