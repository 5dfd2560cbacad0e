"""How often long work reports progress, and how it writes a duration. (No torch: commands import it
at start.)
"""

from __future__ import annotations

SAY_EVERY = 30.0
"""Seconds between lines of a log, where steps are long."""


def duration(seconds: float) -> str:
    """ "1:02:03" or "2:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
