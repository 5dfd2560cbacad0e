"""What a person sees while training: a progress bar on a terminal, a line now and then in a log
file.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from multirate.methods._shared.distillation import simulated_tokens_per_step
from multirate.methods._shared.objective import Summary
from multirate.training.pace import SAY_EVERY, duration


def describe(summary: Summary, loss: float, predicts: str = "drafts") -> str:
    """loss, agreement of every gate and draft step, of drafts simulated tokens per verify step; of
    experts, each depth's mean recall. predicts: as Objective.predicts.
    """
    if predicts == "experts":
        depths = sorted({term.step for term in summary.terms})
        pairs = list(zip(summary.agreement(), summary.terms, strict=True))
        means = [[a for a, t in pairs if t.step == depth] for depth in depths]
        recall = " ".join(
            f"{depth} ahead {sum(m) / len(m):.3f}" for depth, m in zip(depths, means, strict=True)
        )
        return f"loss {loss:.3f}  recall {recall}"
    parts = [
        f"g{t.gate}{f'·s{t.step}' if t.step > 1 else ''} {a:.3f}"
        for t, a in zip(summary.terms, summary.agreement(), strict=True)
    ]
    said = f"loss {loss:.3f}  agreement {' '.join(parts)}"
    if predicts == "exits":
        return said
    return f"{said}  tokens/step {simulated_tokens_per_step(summary.chain()):.2f}"


class TrainProgress:
    """Context manager; ``update`` after each report. Silent when ``shown`` is false (other
    processes).
    """

    def __init__(self, total: int, start: int, shown: bool, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.shown, self.total, self.start, self.began, self.tokens = (
            shown,
            total,
            start,
            time.monotonic(),
            0,
        )
        self.said = self.began
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self.console,
        )
        self.task = self.bar.add_task("", total=total, completed=start)

    def __enter__(self) -> TrainProgress:
        if self.shown and self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.shown and self.console.is_terminal:
            self.bar.stop()

    def advance(self, step: int, tokens: int) -> None:
        """``step`` optimizer steps are done; ``tokens`` more went through the base."""
        self.tokens += tokens
        self.bar.update(self.task, completed=step)

    def report(self, step: int, text: str) -> None:
        """New figures: beside the bar, or as a line of a log."""
        now = time.monotonic()
        self.said = now
        seconds = max(1e-9, now - self.began)
        text = f"{text}  {self.tokens / seconds:.0f} tok/s"
        if not self.shown:
            return
        if self.console.is_terminal:
            self.bar.update(self.task, description=text)
        else:
            left = seconds / max(1, step - self.start) * (self.total - step)
            line = f"step {step}/{self.total}  {text}  {duration(left)} left"
            self.console.print(line, soft_wrap=True, highlight=False)

    def due(self) -> bool:
        return time.monotonic() - self.said >= SAY_EVERY
