"""How many CPUs and how much memory processes on this host may use, by its hardware, their affinity and their cgroup: a
container or a unit of systemd may have less than the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_cpus(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """Number of CPUs, at least 1; a quota of parts of a CPU is rounded down."""
    found = float(len(os.sched_getaffinity(0)))
    for folder in _folders("cpu", cgroups, own):
        for words in (_words(folder / "cpu.max"),  # version 2
                      [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]):
            if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):  # "max", -1: no limit
                found = min(found, int(words[0]) / int(words[1]))
    return max(1, int(found))


def usable_memory_bytes(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    found = int(psutil.virtual_memory().total)
    for folder in _folders("memory", cgroups, own):
        for limit in [*_words(folder / "memory.max"), *_words(folder / "memory.limit_in_bytes")]:
            if limit.isdigit():
                found = min(found, int(limit))
    return found


def _folders(controller: str, cgroups: Path, own: Path) -> Iterator[Path]:
    """Folders of this process's cgroups with a controller, and of all above them: each may have a limit. In a
    container that cannot see these folders, those above are the container's own."""
    try:
        lines = own.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        root = cgroups / controller if names else cgroups  # version 1, and version 2
        folder = root / path.lstrip("/")
        yield from (above for above in (folder, *folder.parents) if above.is_relative_to(root))


def _words(file: Path) -> list[str]:
    """What a file has; empty where there is none."""
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        return []
