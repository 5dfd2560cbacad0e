"""What a model runs on, by name."""

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


def device_name(device: torch.device | str) -> str:
    """`cpu`, or `cuda (<card>)`."""
    device = torch.device(device)
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def machine_name(device: torch.device | str) -> str:
    """What decides which settings are fastest: the processor, its threads, the device."""
    return f"{cpu_name()}, {torch.get_num_threads()} threads, {device_name(device)}"
