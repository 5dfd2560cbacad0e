"""What a model runs on: names, and memory."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def cpu_name() -> str:
    """The processor's marketing name, as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def free_memory(system: Path = Path("/")) -> int | None:
    """Bytes that a process may still take without others being pushed out: of the machine, and of
    the control group (v2) that limits a container, where there is one. None: the system does not
    tell. system: its root.
    """
    found = []
    try:
        for line in (system / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    try:
        group = system / "sys/fs/cgroup"
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        found.append(limit - used + int(kept.get("inactive_file", 0)))
    except (OSError, ValueError):  # none, or "max", which is no limit
        pass
    return min(found, default=None)


def device_name(device: torch.device | str) -> str:
    """`cpu`, or `cuda (<card>)`."""
    device = torch.device(device)
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def machine_name(device: torch.device | str) -> str:
    """What decides which settings are fastest: the processor, its threads, the device."""
    return f"{cpu_name()}, {torch.get_num_threads()} threads, {device_name(device)}"
