"""What the system says of its memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from multirate.model.machine import free_memory


def write(system: Path, name: str, text: str) -> None:
    path = system / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


MACHINE = "MemTotal:       2000 kB\nMemFree: 100 kB\nMemAvailable:   1000 kB\n"


def test_nothing_is_told(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    write(tmp_path, "proc/meminfo", "MemAvailable: many kB")
    assert free_memory(tmp_path) is None


@pytest.mark.parametrize(
    "limit, free",
    [
        ("max", 1_024_000),
        ("700000", 700_000 - 300_000 + 50_000),  # what files keep can be dropped
        ("9000000", 1_024_000),
    ],
)
def test_a_containers_limit_counts_where_it_is_the_narrower(
    tmp_path: Path, limit: str, free: int
) -> None:
    write(tmp_path, "proc/meminfo", MACHINE)
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{limit}\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "300000\n")
    write(tmp_path, "sys/fs/cgroup/memory.stat", "anon 250000\ninactive_file 50000\n")
    assert free_memory(tmp_path) == free
