"""The base class of all methods' configurations: a dataclass that checks its fields and reads JSON
strictly.
"""

from __future__ import annotations

import reprlib
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self, get_type_hints

from multirate.errors import UserError
from multirate.json_values import accepts, spell
from multirate.methods._shared.shape import BaseShape

MAX_COUNT = 1 << 20
"""Upper limit of every field that decides a tensor's size. Configurations may come from untrusted
files, and products of sizes must stay below 2^63.
"""


@dataclass(frozen=True)
class MethodConfig:
    """Base class of the configurations. Subclasses check ranges in ``check`` with ``self.require``.

    Every field is type-checked when an instance is made, and lists become tuples. An invalid value
    raises UserError with the field, its value and what is accepted.
    """

    METHOD: ClassVar[str] = ""
    FROM_BASE: ClassVar[dict[str, str]] = {}
    """In words, the defaults that a base model decides."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            if not accepts(value, hints[field.name]):
                self.refuse(field.name, value, spell(hints[field.name]))
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))
        self.check()

    def check(self) -> None:
        """Range checks of the subclass."""

    def check_base(self, base: BaseShape) -> None:
        """Raises UserError for a config that does not fit ``base``."""

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        """Field values that a base model decides, where the user does not."""
        return {}

    @classmethod
    def for_base(cls, base: BaseShape, **options: Any) -> Self:
        """The defaults for a base model, with ``options`` replacing them. Raises UserError for
        options that cannot be used.
        """
        config = cls.from_json(cls.defaults(base) | options)
        config.check_base(base)
        return config

    @classmethod
    def owner(cls) -> str:
        """The name that error messages use for these settings."""
        return cls.METHOD or cls.__name__

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]

    def refuse(self, field: str, value: Any, accepted: str) -> None:
        """Raises UserError for a field's value, naming what is accepted."""
        raise UserError(
            f"{self.owner()}: '{field}' is {reprlib.repr(value)}; accepted: {accepted}."
        )

    def require(self, condition: bool, field: str, accepted: str) -> None:
        """Raises UserError for a field's value unless the condition holds."""
        if not condition:
            self.refuse(field, getattr(self, field), accepted)

    def require_count(self, *names: str, least: int = 1) -> None:
        """Requires sizes and counts to be from ``least`` to MAX_COUNT."""
        for name in names:
            self.require(
                least <= getattr(self, name) <= MAX_COUNT,
                name,
                f"at least {least}, at most {MAX_COUNT}",
            )

    def require_draft_vocab(self, most: int | None = None) -> None:
        """Requires draft_vocab to be null or at least 2, or at most `most` if that is given."""
        size: int | None = getattr(self, "draft_vocab")  # noqa: B009 - of those that have one
        if most is None:
            self.require(size is None or size >= 2, "draft_vocab", "null or at least 2")
        else:
            accepted = f"at most the base model's {most} tokens"
            self.require(size is None or size <= most, "draft_vocab", accepted)

    def require_share(self, *names: str) -> None:
        """Requires probability thresholds to be null or from 0 to 1."""
        for name in names:
            value = getattr(self, name)
            self.require(value is None or 0 <= value <= 1, name, "null or a number from 0 to 1")

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; ``from_json`` restores an equal config."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Reads what ``to_json`` wrote. Raises UserError for unknown, missing or invalid fields."""
        if not isinstance(data, dict):
            raise UserError(f"{cls.owner()} must be a JSON object, not {type(data).__name__}.")
        known = cls.names()
        for name in data:
            if name not in known:
                raise UserError(
                    f"{cls.owner()} has no field {reprlib.repr(name)} (value "
                    f"{reprlib.repr(data[name])}); accepted fields: {', '.join(known)}."
                )
        try:
            return cls(**data)
        except TypeError as error:
            raise UserError(f"{cls.owner()} is incomplete: {error}.") from None
