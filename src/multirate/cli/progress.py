"""A progress bar on stderr that is gone when it is full, and nowhere when stderr is not a terminal."""

from __future__ import annotations

from types import TracebackType

from multirate.cli import options


class Bar:
    """`to(done, all)` moves it, `advance()` by one. A context manager."""

    def __init__(self, text: str, total: int | None = None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = options.console(stderr=True)
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task(text, total=total)

    def to(self, done: int, total: int) -> None:
        """So far `done` of `total`."""
        self._progress.update(self._task, completed=done, total=total)

    def advance(self) -> None:
        """One more."""
        self._progress.advance(self._task)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()
