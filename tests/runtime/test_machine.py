"""What the system says of its memory and processors."""

from __future__ import annotations

from pathlib import Path

import pytest

from multirate.runtime import machine
from multirate.runtime.machine import free_memory, usable_processors


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


@pytest.fixture
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: set(range(8)))


@pytest.mark.usefixtures("eight_processors")
def test_the_processors_that_a_process_may_run_on(tmp_path: Path) -> None:
    assert usable_processors(tmp_path) == 8


@pytest.mark.usefixtures("eight_processors")
@pytest.mark.parametrize(
    "limit, processors",
    [("max 100000", 8), ("200000 100000", 2), ("150000 50000", 3), ("20000 100000", 1), ("x", 8)],
)
@pytest.mark.parametrize("group", ["", "pod/container", "pod"])
def test_a_quota_of_a_control_group(
    tmp_path: Path, limit: str, processors: int, group: str
) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/pod/container\n")
    write(tmp_path, f"sys/fs/cgroup/{group}/cpu.max", f"{limit}\n")
    assert usable_processors(tmp_path) == processors


@pytest.mark.usefixtures("eight_processors")
@pytest.mark.parametrize("quota, processors", [("-1", 8), ("300000", 3)])
def test_a_quota_of_an_older_control_group(tmp_path: Path, quota: str, processors: int) -> None:
    write(tmp_path, "proc/self/cgroup", "5:memory:/job\n4:cpu,cpuacct:/job\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", quota)
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000")
    assert usable_processors(tmp_path) == processors


@pytest.mark.usefixtures("eight_processors")
def test_the_narrowest_of_nested_quotas_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/pod/container\n")
    write(tmp_path, "sys/fs/cgroup/pod/cpu.max", "200000 100000\n")
    write(tmp_path, "sys/fs/cgroup/pod/container/cpu.max", "400000 100000\n")
    assert usable_processors(tmp_path) == 2
