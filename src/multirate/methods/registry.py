"""Method names → drafters. A method registers itself; adding one touches its folder and one line here."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

from multirate.decoding.drafter import Drafter
from multirate.errors import UserError
from multirate.model.decoder import Decoder

# modules whose import registers their methods
_MODULES = [
    "multirate.methods.kangaroo.decode",
    "multirate.methods.layerskip.decode",
    "multirate.methods.m2r2.decode",
    "multirate.methods.prompt_lookup.decode",
]

Factory = Callable[[Decoder, Any, Any], Drafter | None]
_F = TypeVar("_F", bound=Callable[..., Drafter | None])


@dataclass(frozen=True)
class Method:
    """A registered method. factory(decoder, accelerator or None, config) → a Drafter, or None: decode plainly."""

    name: str
    description: str
    factory: Factory
    config_class: type | None = None
    lossless: bool = True

    def config(self, values: Any = None) -> Any:
        """The method's config from None (defaults), a mapping of its fields, or an instance. UserError otherwise."""
        if self.config_class is None:
            if values:
                raise UserError(f"method {self.name} has no settings; {values!r} was given")
            return None
        if values is None:
            return self.config_class()
        if isinstance(values, self.config_class):
            return values
        assert is_dataclass(self.config_class)
        names = [f.name for f in fields(self.config_class)]
        if not isinstance(values, Mapping):
            raise UserError(
                f"settings of method {self.name} are {values!r}; accepted is a mapping of {', '.join(names)}"
            )
        for name in values:
            if name not in names:
                raise UserError(f"method {self.name} has no setting {name!r}; accepted: {', '.join(names)}")
        return self.config_class(**values)

    def drafter(self, decoder: Decoder, accelerator: Any = None, config: Any = None) -> Drafter | None:
        """This method's drafter for `decoder`; None: decode plainly. UserError for settings that cannot be used."""
        return self.factory(decoder, accelerator, self.config(config))


_METHODS: dict[str, Method] = {}


def register(name: str, description: str, config: type | None = None, lossless: bool = True) -> Callable[[_F], _F]:
    """Decorator of a factory(decoder, accelerator or None, config). description: one line."""

    def add(factory: _F) -> _F:
        if name in _METHODS:
            raise ValueError(f"method {name} is registered twice")
        _METHODS[name] = Method(name, description, factory, config, lossless)
        return factory

    return add


@register("autoregressive", "plain decoding, one token per pass: the baseline")
def _autoregressive(decoder: Decoder, accelerator: Any, config: Any) -> Drafter | None:
    return None


def parse_variant(name: str) -> tuple[str, dict[str, Any]]:
    """"m2r2-carry:lookup=0:nodes=5" → ("m2r2-carry", {"lookup": 0, "nodes": 5}). UserError for a part without "="."""
    base, *parts = name.split(":")
    return base, parse_settings(parts, f"in method {name!r},")


def parse_settings(given: Sequence[str], where: str) -> dict[str, Any]:
    """["nodes=5", "gates=[6]", "trust=arla"] → their values, JSON or else words. UserError, begun by `where`."""
    values: dict[str, Any] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise UserError(f"{where} {text!r} is not NAME=VALUE")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value  # a word, such as mlp_adapter=lora
    return values


def methods() -> dict[str, Method]:
    """All registered methods by name."""
    for module in _MODULES:
        importlib.import_module(module)
    return dict(sorted(_METHODS.items()))


def method(name: str) -> Method:
    """The method called `name`. Raises UserError listing the accepted names."""
    known = methods()
    if name not in known:
        raise UserError(f"method {name!r} is unknown; accepted: {', '.join(known)}")
    return known[name]
