"""CPUs and memory that cgroups leave to this host's processes, of either version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from elastic_rl.host.machine_resources import usable_cpus, usable_memory_bytes

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with 8 CPUs."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))


def usable(folder: Path, own: str, files: Mapping[str, str]) -> tuple[int, int]:
    for name, text in files.items():
        path = folder / "cgroups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (folder / "own").write_text(own)
    return (usable_cpus(folder / "cgroups", folder / "own"), usable_memory_bytes(folder / "cgroups", folder / "own"))


@pytest.mark.parametrize(("files", "cpus"), [
    ({}, 8), ({"a/b/cpu.max": "max 100000"}, 8), ({"a/b/cpu.max": "250000 100000"}, 2),
    ({"a/cpu.max": "300000 100000"}, 3), ({"a/b/cpu.max": "max 100000", "cpu.max": "400000 100000"}, 4),
    ({"a/b/cpu.max": "50000 100000"}, 1),
    ({"a/b/cpu.max": "6400000 100000"}, 8), ({"a/c/cpu.max": "100000 100000"}, 8), ({"a/b/cpu.max": ""}, 8)])
def test_cpus_are_bounded_by_the_quota_of_the_cgroup_or_one_above_it(files: dict[str, str], cpus: int, tmp_path: Path
                                                                     ) -> None:
    assert usable(tmp_path, "0::/a/b\n", files) == (cpus, psutil.virtual_memory().total)


def test_limits_of_version_1_and_of_a_container_that_sees_its_own_cgroup_only(tmp_path: Path) -> None:
    own = "7:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n2:cpuset:/docker/x\n"
    files = {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "50000", "cpuset/cpu.cfs_quota_us": "1",
             "memory/memory.limit_in_bytes": str(GIB)}
    assert usable(tmp_path, own, files) == (3, GIB)
    without = {**files, "cpu/cpu.cfs_quota_us": "-1", "memory/memory.limit_in_bytes": str(1 << 62)}
    assert usable(tmp_path, own, without) == (8, psutil.virtual_memory().total)


def test_memory_is_bounded_by_the_least_limit(tmp_path: Path) -> None:
    files = {"a/b/memory.max": "max", "a/memory.max": str(GIB), "memory.max": str(2 * GIB)}
    assert usable(tmp_path, "0::/a/b\n", files) == (8, GIB)


def test_host_without_cgroups_has_what_the_machine_has(tmp_path: Path) -> None:
    nothing = tmp_path / "none"
    assert (usable_cpus(nothing, nothing), usable_memory_bytes(nothing, nothing)) == (8, psutil.virtual_memory().total)
