"""Where a figure comes from: code, machine, versions and arguments."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

import multirate
from multirate.errors import UserError
from multirate.io import parse_json
from multirate.runtime.machine import cpu_name, device_name


def commit() -> str | None:
    """The git commit this package runs from, with `-dirty` when its sources are changed; None for a
    wheel.
    """
    folder = Path(multirate.__file__).resolve().parent
    try:
        inside = _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        if inside is None:  # installed below somebody else's repository: that commit is not ours
            return None
        head = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if head and changed else head


def _git(folder: Path, *arguments: str) -> str | None:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else None


DECISIVE = ("avx2", "avx_vnni", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "i8mm")
"""Instruction sets that decide how fast a model runs; names as in /proc/cpuinfo."""


def cpu_features() -> list[str]:
    """Which of DECISIVE the processor has: one marketing name stands for very different
    machines.
    """
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                found = set(line.split(":", 1)[1].split())
                return [name for name in DECISIVE if name in found]
    except OSError:
        pass
    return []


VARIABLES = (
    "MULTIRATE_ARCH",
    "MULTIRATE_KERNEL_FLAGS",
    "MULTIRATE_NATIVE",
)
"""Of the environment, what decides how a model runs."""


RESULTS = "a file of results that multirate wrote"


def collected(path: Path) -> bool:
    """Whether a file is JSON with what `collect` collects."""
    try:
        found = parse_json(path.read_bytes(), path)
    except (OSError, UserError):
        return False
    return isinstance(found, dict) and {"version", "platform", "torch", "argv"} <= found.keys()


def collect(device: torch.device | str = "cpu", **more: Any) -> dict[str, Any]:
    """Everything needed to judge or repeat a figure, JSON-ready. `more` is added as given."""
    return {
        "version": multirate.__version__,
        "commit": commit(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "cpu": cpu_name(),
        "cpu_features": cpu_features(),
        "cpu_count": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        **more,
    }
