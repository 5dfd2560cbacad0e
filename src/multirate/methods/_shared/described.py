"""The settings of a method as tables show them: on the command line, and in its page."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

from multirate.methods._shared.field_help import Setting, settings_of
from multirate.methods._shared.shape import BaseShape
from multirate.methods.spec import MethodSpec

_EXAMPLE = BaseShape("", 24, 1024, 65536, 16, 8, 64, 2816, 1e-5, 1e4, num_experts=0)
"""A base model whose defaults are shown, where they are not given in words."""


def decoding_settings(method: MethodSpec) -> list[Setting]:
    """What a user may set when decoding."""
    if method.settings is None:
        return []
    defaults = {field.name: field.default for field in fields(method.settings)}
    return _with_defaults(method.settings, defaults)


def training_settings(method: MethodSpec) -> list[Setting]:
    """What a user may set when training."""
    if method.training is None:
        return []
    base = replace(_EXAMPLE, num_experts=8) if method.role == "experts" else _EXAMPLE
    example = method.training.config_for(base)
    words = method.training.config.FROM_BASE
    return _with_defaults(method.training.config, vars(example) | words)


def _with_defaults(config: type, defaults: dict[str, Any]) -> list[Setting]:
    return [replace(one, default=_spelled(defaults[one.name])) for one in settings_of(config)]


def _spelled(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(list(value) if isinstance(value, tuple) else value)
