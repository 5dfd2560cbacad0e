"""`model.generate(..., custom_generate=...)` of transformers, by a callable or by a saved accelerator's folder."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multirate.integration.callable import CustomGenerate, custom_generate
    from multirate.integration.folder import generate_from_folder
    from multirate.integration.loader_files import write_custom_generate

_HOMES = {
    "CustomGenerate": "callable",
    "custom_generate": "callable",
    "generate_from_folder": "folder",
    "write_custom_generate": "loader_files",
}

__all__ = ["CustomGenerate", "custom_generate", "generate_from_folder", "write_custom_generate"]


def __getattr__(name: str) -> Any:
    # On first use: saving an accelerator needs the loader's files only, and comes before the engine in import order.
    if name not in _HOMES:
        raise AttributeError(f"module 'multirate.integration' has no attribute {name!r}")
    return getattr(import_module(f"multirate.integration.{_HOMES[name]}"), name)
