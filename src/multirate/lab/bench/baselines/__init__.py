"""Other engines and methods to compare with: `multirate bench --baselines NAME,…`.

One file each with a `BASELINE`; nothing else names them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from multirate.engine import Engine
from multirate.errors import UserError
from multirate.lab.bench.runner import MethodRun, Unavailable


@dataclass(frozen=True)
class Contest:
    """What a baseline is given.

    model: as the user named it. argument: what followed the baseline's name and `=`. positions:
    tokens of the longest prompt and its answer together. stack: what to close afterwards.
    """

    engine: Engine
    model: str
    argument: str | None
    max_new_tokens: int
    positions: int
    threads: int
    stack: ExitStack

    def check_vocabulary(self, name: str, size: int) -> None:
        """Raises Unavailable where `name` has another number of tokens than the model."""
        ours = self.engine.decoder.info.vocab_size
        if size != ours:
            raise Unavailable(f"{name} has a vocabulary of {size} tokens, but the model has {ours}")


@dataclass(frozen=True)
class Baseline:
    """prepare(contest) → its rows; it raises Unavailable where there can be none.

    argument: what `NAME=…` stands for, None where it takes nothing.
    """

    name: str
    prepare: Callable[[Contest], list[MethodRun]]
    argument: str | None = None


def all_baselines() -> dict[str, Baseline]:
    """By name, of every file of this folder that has a BASELINE."""
    modules = (
        importlib.import_module(f"{__name__}.{found.name}")
        for found in pkgutil.iter_modules(__path__)
        if not found.name.endswith("_worker")
    )
    return {module.BASELINE.name: module.BASELINE for module in modules}


def parse_baselines(text: str) -> dict[str, str | None]:
    """ "llamacpp=FILE.gguf,assisted" → name → argument. UserError for a name or argument that
    nobody takes.
    """
    known = all_baselines()
    chosen: dict[str, str | None] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, argument = part.partition("=")
        if name not in known:
            raise UserError(f"--baselines names {name!r}; accepted: {', '.join(sorted(known))}")
        if separator and known[name].argument is None:
            raise UserError(f"--baselines {part}: {name} takes no argument")
        chosen[name] = argument or None
    return chosen


def prepare(
    baselines: dict[str, str | None], contest: Callable[[str | None], Contest]
) -> tuple[list[MethodRun], list[dict[str, str]]]:
    """(their rows, {"method", "reason"} of those that cannot be measured)."""
    rows: list[MethodRun] = []
    missing: list[dict[str, str]] = []
    for name, argument in baselines.items():
        try:
            rows += all_baselines()[name].prepare(contest(argument))
        except Unavailable as error:
            missing.append({"method": name, "reason": str(error)})
    return rows, missing
