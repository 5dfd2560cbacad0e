"""A progress bar on stderr that disappears when it is full. If stderr is not a terminal, it prints
a line from time to time instead.
"""

from __future__ import annotations

import time

from multirate.cli import options
from multirate.training.pace import SAY_EVERY, duration


class Bar:
    """A context manager. `to(done, total)` moves the bar, `advance()` moves it by one."""

    def __init__(self, text: str, total: int | None = None) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            Task,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.text import Text

        class Rate(ProgressColumn):
            def render(self, task: Task) -> Text:
                return Text("" if task.speed is None else f"{task.speed:.3g}/s")

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            Rate(),
            TimeRemainingColumn(),
        )
        console = options.console(stderr=True)
        self._progress = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._progress.add_task(text, total=total)
        self._text, self._done, self._total = text, 0, total
        self._began = self._said = time.monotonic()
        self._first: int | None = None

    def to(self, done: int, total: int) -> None:
        """So far `done` of `total`."""
        self._done, self._total = done, total
        self._progress.update(self._task, completed=done, total=total)
        now = time.monotonic()
        if self._first is None:
            self._first, self._began = done, now  # an earlier run's share took no time
        if not self._progress.disable or now - self._said < SAY_EVERY:
            return
        self._said = now
        pace = (done - self._first) / max(1e-9, now - self._began)
        left = f", {pace:.3g}/s, {duration((total - done) / pace)} left" if pace > 0 else ""
        options.note(f"{self._text}: {done} of {total}{left}")

    def advance(self) -> None:
        """Moves it by one, if the total is known."""
        assert self._total is not None
        self.to(self._done + 1, self._total)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
