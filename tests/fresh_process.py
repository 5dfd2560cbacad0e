"""Python processes that begin as a user's does, but for the imports, which take most of the time:
each is forked from a server that has imported the libraries and run nothing. Where what is tested
is the imports, or what libraries read from the environment as they are imported, start a real
interpreter.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

_IMPORTED = [
    "multirate.engine",
    "multirate.loading.hub",
    "multirate.training.loop",
    "transformers.models.llama.modeling_llama",
]


@dataclass(frozen=True)
class Finished:
    """returncode: minus the signal's number where one ended it."""

    returncode: int
    stdout: str
    stderr: str


class FreshProcess:
    """`code` with sys.argv[1:] = arguments, and `env` instead of this process's environment."""

    def __init__(self, code: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(_IMPORTED)
        self._folder = tempfile.TemporaryDirectory()
        self._said = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        environment = {**(os.environ if env is None else env)}
        self._process: BaseProcess = server.Process(
            target=_run, args=(code, arguments, environment, self._said)
        )
        self._process.start()

    def finish(self, timeout: float = 120.0) -> Finished:
        """Wait for its end; seconds."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            os.kill(self._process.pid or 0, signal.SIGABRT)  # it says where it is
            self._process.join(10)
            self._process.kill()
            self._process.join()
        out, error = (path.read_text() if path.exists() else "" for path in self._said)
        self._folder.cleanup()
        assert code is not None, f"not at its end after {timeout} s; it said: {error[-3000:]}"
        return Finished(code, out, error)


def run(
    code: str, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 120.0
) -> Finished:
    """A process from its beginning to its end."""
    return FreshProcess(code, *arguments, env=env).finish(timeout)


def _run(
    code: str, arguments: tuple[str, ...], environment: dict[str, str], said: list[Path]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(said, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    faulthandler.enable()
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<fresh process>", "exec"), {"__name__": "__main__"})
