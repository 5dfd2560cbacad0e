"""Help pages in plain text: commands and options in groups, at most 80 columns wide.

A group is the `rich_help_panel` of a command or option. What has none comes first.
"""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

TEXT, MACHINE, ADVANCED = "Input and output", "Hardware", "Advanced"
MEASURED, OPTIMIZER, FILES = "What is measured", "Optimizer and loss", "Data and checkpoints"
SAMPLING, DYNAMIC, EXPERTS = "Sampling", "Dynamic mode (lossy)", "Experts loaded from disk"
LOAD, HTTP = "Load", "HTTP"

PANELS = {
    **dict.fromkeys(("lr", "warmup_steps", "gradient_accumulation", "seed"), OPTIMIZER),
    **dict.fromkeys(
        (
            "max_length",
            "heldout_files",
            "heldout_samples",
            "checkpoint_steps",
            "log_every",
            "teacher_states",
        ),
        FILES,
    ),
    **dict.fromkeys(("tokens_per_batch", "precision", "compile"), MACHINE),
}
"""The groups of training settings."""
_NAMES = 30
"""Widest column of names."""
_KINDS = {
    "str": "text",
    "Path": "path",
    "int range": "int",
    "float": "number",
    "float range": "number",
}


class Command(TyperCommand):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            option = parameter.param_type_name == "option"
            panel = getattr(parameter, "rich_help_panel", None) if option else "Arguments"
            name, text = record
            groups.setdefault(panel or "Options", []).append((_readable(name), text))
        _write(formatter, groups)


def write_commands(group: Any, ctx: Any, formatter: Any) -> None:
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        panel = command.rich_help_panel or "Commands"
        groups.setdefault(panel, []).append((name, command.get_short_help_str(formatter.width)))
    _write(formatter, groups)


def _write(formatter: Any, groups: dict[str, list[tuple[str, str]]]) -> None:
    width = min(_NAMES, max((len(name) for rows in groups.values() for name, _ in rows), default=0))
    for title, rows in groups.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows], _NAMES)


def _readable(name: str) -> str:
    """`--stop <list[str]>` as `--stop <text>`."""

    def kind(found: re.Match[str]) -> str:
        return f"<{_KINDS.get(found[1], found[1])}>"

    return re.sub(r"<(?:list\[)?([^<>\[\]]+)\]?>", kind, name)
