"""Engines kept on the model they belong to, so that packing its weights is paid once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from multirate.engine import Engine, attach
from multirate.generation_lock import lock_of
from multirate.runtime.weight_watch import writes

if TYPE_CHECKING:
    from multirate.training.checkpoint import Accelerator

_ATTRIBUTE = "_multirate_engines"
_KEPT = 4


class _Holder:
    """Dies with the model it hangs on. Copies and pickles of that model start without engines:
    theirs are others.
    """

    def __init__(self) -> None:
        self.engines: dict[tuple[Any, ...], Engine] = {}

    def __deepcopy__(self, memo: Any) -> _Holder:
        return _Holder()

    def __reduce__(self) -> tuple[type[_Holder], tuple[()]]:
        return _Holder, ()


def engine_of(
    model: Any, accelerator: str | os.PathLike[str] | Accelerator | None, backend: str
) -> Engine:
    """The engine of `model` with this accelerator, made on first use, and again when the weights
    have changed. Threads that ask for the same one get the same one.
    """
    with lock_of(model).held():
        return _engine_of(model, accelerator, backend)


def drop_engines(model: Any) -> None:
    """Forgets the engines of `model`: the next call makes a new one."""
    with lock_of(model).held():
        model.__dict__.pop(_ATTRIBUTE, None)


def _engine_of(
    model: Any, accelerator: str | os.PathLike[str] | Accelerator | None, backend: str
) -> Engine:
    holder = model.__dict__.get(_ATTRIBUTE)
    if not isinstance(holder, _Holder):
        holder = model.__dict__[_ATTRIBUTE] = _Holder()
    named = isinstance(accelerator, (str, os.PathLike))
    which = os.path.abspath(accelerator) if named and os.path.exists(accelerator) else accelerator  # type: ignore[arg-type]
    key = (which if named or accelerator is None else id(accelerator), backend)
    state = _state(model)
    engine = holder.engines.get((*key, state))
    if engine is None:
        # Engines of older weights are of no use to anybody, and packed weights are as large as the
        # model.
        holder.engines = {
            k: e for k, e in list(holder.engines.items())[1 - _KEPT :] if k[-1] == state
        }
        engine = holder.engines[(*key, state)] = attach(model, accelerator, backend=backend)
    return engine


def _state(model: Any) -> int:
    """Changes when a parameter is replaced, cast, moved or written to in place."""
    return hash(tuple((p.data_ptr(), writes(p), p.dtype) for p in model.parameters()))
