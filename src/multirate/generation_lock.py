"""One generation at a time for each engine."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from multirate.torch_modes import own_modes


class GenerationLock:
    """Threads take turns with it. A thread that has its turn may take it again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.inherited = False
        """Whether this process was made by fork() after this was made."""
        _made.add(self)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Waits until no other thread holds it; releases it however the block ends. Meanwhile the
        thread leaves its caller's modes of torch, because what is made here is used in later calls.
        """
        if self.inherited and torch.get_num_threads() > 1:
            # OpenMP's threads stayed in the parent process, and torch would wait for them for ever
            torch.set_num_threads(1)
        with self._lock, own_modes():
            yield

    def after_fork(self) -> None:
        """Resets the lock in a forked process, where the thread that held it does not exist."""
        self._lock, self.inherited = threading.RLock(), True


def lock_of(model: Any) -> GenerationLock:
    """The lock that all users of the model's own modules share, because they change its settings
    and hooks while they run.
    """
    with _looking_up:
        found = _of_model.get(model)
        if found is None:
            found = _of_model[model] = GenerationLock()
        return found


_made: weakref.WeakSet[GenerationLock] = weakref.WeakSet()
_of_model: weakref.WeakKeyDictionary[Any, GenerationLock] = weakref.WeakKeyDictionary()
_looking_up = threading.Lock()


def _after_fork() -> None:
    global _looking_up
    _looking_up = threading.Lock()
    for turns in list(_made):
        turns.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
