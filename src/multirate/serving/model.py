"""What the HTTP side knows of the model that it serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multirate.decoding.logits import SamplingSettings
from multirate.errors import UserError
from multirate.serving.constraints import Grammars
from multirate.serving.errors import ApiError
from multirate.serving.settings import ServingSettings

if TYPE_CHECKING:
    from multirate.engine import Engine


@dataclass(frozen=True)
class ServedModel:
    """A model under its name."""

    name: str
    tokenizer: Any
    vocabulary: int
    """Number of the token ids that a prompt may have and an answer can have."""
    context: int | None
    """Maximum of a prompt's and its answer's tokens together. None: no limit."""
    ends: tuple[int, ...]
    """Tokens that end a text."""
    sampling: Callable[..., SamplingSettings]
    """The model's own sampling settings with the given fields replaced: `Engine.sampling`."""
    method: str
    """The method that drafts."""
    aliases: frozenset[str] = frozenset()
    """Further names that requests may use."""
    stop_strings: tuple[str, ...] = ()
    """The model's own."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""
    grammars: Grammars = field(init=False)
    _texts: dict[int, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        grammars = Grammars(self.tokenizer, self.vocabulary, self.ends)
        object.__setattr__(self, "grammars", grammars)

    @classmethod
    def of(cls, engine: Engine, given: str, settings: ServingSettings) -> ServedModel:
        """The engine's. given: what the user called the model. Raises UserError for a model without
        a tokenizer.
        """
        if engine.tokenizer is None:
            raise UserError(f"{given} has no tokenizer, and serving needs one")
        own = engine.stopping()
        limits = [settings.context, engine.decoder.info.max_positions]
        return cls(
            name=short_name(given),
            tokenizer=engine.tokenizer,
            vocabulary=engine.decoder.info.vocab_size,
            context=min((limit for limit in limits if limit is not None), default=None),
            ends=own.eos_token_ids,
            sampling=engine.sampling,
            method=settings.method or engine.default,
            aliases=frozenset({given}),
            stop_strings=own.stop_strings,
        )

    def check_name(self, asked: str | None) -> None:
        """Raises ApiError for another model's name; None is this model's."""
        if asked is not None and asked != self.name and asked not in self.aliases:
            raise ApiError(
                f"there is no model {asked[:100]!r}; accepted: {self.name}",
                "model",
                404,
                "model_not_found",
            )

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises ApiError for an id outside the vocabulary."""
        for token in ids:
            if not 0 <= token < self.vocabulary:
                raise ApiError(
                    f"{param} has the token id {token}; accepted: 0 to {self.vocabulary - 1}", param
                )

    def check_length(self, prompt: Sequence[int], param: str) -> None:
        """Raises ApiError for an empty prompt and for one longer than the context."""
        if not prompt:
            raise ApiError(f"{param} has no tokens: give some text", param)
        if self.context is not None and len(prompt) > self.context:
            raise ApiError(
                f"{param} has {len(prompt)} tokens; the context is {self.context} tokens, for "
                "the prompt and the answer together",
                param,
                code="context_length_exceeded",
            )

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids. special: with those that the tokenizer puts around a text."""
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def token_text(self, token: int) -> str:
        """One token, with special tokens' own text."""
        found = self._texts.get(token)
        if found is None:
            found = self._texts[token] = self.decode([token], skip_special=False)
        return found

    def token_bytes(self, token: int) -> list[int]:
        """One token's bytes: part of a character where the token is."""
        try:
            return list(self.grammars.tokens().decode_bytes([token]))
        except UserError:
            return list(self.token_text(token).encode())


def short_name(given: str) -> str:
    """What clients call a model: a file's name without its ending, a folder's name, or the name as
    it was given.
    """
    path = Path(given)
    if not path.exists():
        return given
    path = path.resolve()
    return path.name.removesuffix(".gguf") or given
