"""What a model runs on: names, memory and processors."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch


def cpu_name() -> str:
    """The processor's marketing name, if the system reports one."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def free_memory(system: Path = Path("/")) -> int | None:
    """Bytes that a process may still use without pushing others out: of the machine, and of the
    control group (v2) that limits a container, if any. None: the system does not report it. system:
    its root.
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


def usable_processors(system: Path = Path("/")) -> int:
    """How many processors this process may keep busy: those that it may run on, or fewer where a
    control group (v1 or v2) limits its processor time. At least 1. system: the system's root.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    # a thread beyond the quota would be stopped for a part of the time, and the others wait for it
    return max(1, min([allowed, *(round(quota) for quota in _quotas(system))]))


def _quotas(system: Path) -> Iterator[float]:
    """The limits, in processors, of this process's control groups and of those they are in."""
    try:
        groups = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # v2
            base, names = system / "sys/fs/cgroup", ["cpu.max"]
        elif "cpu" in controllers.split(","):
            base = system / "sys/fs/cgroup" / controllers
            names = ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        group = Path(path.lstrip("/"))
        # the path may be the host's and not be here: a container sees its own group as the root
        for folder in (base / group, *(base / parent for parent in group.parents)):
            try:
                words = " ".join((folder / name).read_text() for name in names).split()
                quota, period = int(words[0]), int(words[1])
            except (OSError, ValueError, IndexError):  # no limit: "max"
                continue
            if quota > 0 and period > 0:
                yield quota / period


def device_name(device: torch.device | str) -> str:
    """`cpu`, or `cuda (<card>)`."""
    device = torch.device(device)
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def machine_name(device: torch.device | str) -> str:
    """What decides which settings are fastest: the processor, its threads, the device."""
    return f"{cpu_name()}, {torch.get_num_threads()} threads, {device_name(device)}"
