"""Committed results, as the README's tables read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "lab" / "results"


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def machine(data: dict[str, Any]) -> str:
    """The processor and its widest instructions: one marketing name covers very different
    machines.
    """
    features = data.get("cpu_features") or []
    widest = next(
        (name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in features), None
    )
    return f"{data.get('cpu', data['device'])}" + (
        f" ({widest.upper().replace('_', '-')})" if widest else ""
    )


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    made = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*made, *(f"| {' | '.join(line)} |" for line in lines)])
