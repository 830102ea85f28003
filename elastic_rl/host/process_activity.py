"""What processes have done so far: CPU time, time without a CPU, bytes read. Read from /proc, never from the process.

The numbers tell a slow process from a hung one: on an overloaded machine it waits for a CPU most of the time, and the
kernel counts that. What cannot be read (another user's process, a kernel without the counter) counts as nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Activity:
    """The activity of one process since its start, all its threads that still live; or the sum over processes."""

    cpu_s: float = 0.0
    """Seconds on a CPU."""
    starved_s: float = 0.0
    """Seconds in which a thread was ready to run and had no CPU. The kernel counts a wait when it is over: see
    ``ready``."""
    read_bytes: int = 0
    """Read by system calls, from the page cache too."""
    on_disk: bool = False
    """Whether a thread sleeps uninterruptibly now, as one does that reads a slow disk or is being swapped in."""
    ready: bool = False
    """Whether a thread runs, or waits for a CPU, now."""

    def __add__(self, other: Activity) -> Activity:
        return Activity(self.cpu_s + other.cpu_s, self.starved_s + other.starved_s,
                        self.read_bytes + other.read_bytes, self.on_disk or other.on_disk, self.ready or other.ready)


class Since(NamedTuple):
    """Seconds since the last reading, of the process that did most. ``on_disk`` and ``ready`` as in ``Activity``, of
    any process."""

    cpu_s: float = 0.0
    starved_s: float = 0.0
    on_disk: bool = False
    ready: bool = False


def of_process(pid: int) -> Activity | None:
    """The activity of one process; None when there is no such process."""
    folder = Path(f"/proc/{pid}")
    try:
        cpu_s, starved_s, states = _cpu_s(folder), 0.0, set[str]()
        counted_s = 0.0
        for thread in os.listdir(folder / "task"):
            state, ran_s, waited_s = _thread(folder / "task" / thread)
            states.add(state)
            counted_s += ran_s
            starved_s += waited_s
    except (OSError, IndexError, ValueError):
        return None
    return Activity(max(cpu_s, counted_s), starved_s, _read_bytes(folder), "D" in states, "R" in states)


def of_tree(pid: int) -> Activity:
    """The sum over a process and its descendants. A descendant that ends makes it smaller."""
    try:
        root = psutil.Process(pid)
        pids = [pid, *(p.pid for p in root.children(recursive=True))]
    except psutil.Error:
        pids = [pid]
    return sum(filter(None, map(of_process, pids)), Activity())


def listening(port: int) -> list[int]:
    """Processes that listen on a TCP port of this host, and their descendants; empty where this user may not see."""
    try:
        owners = {c.pid for c in psutil.net_connections("tcp")
                  if c.pid and c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port}
        return [p.pid for owner in owners for p in (psutil.Process(owner),
                                                    *psutil.Process(owner).children(recursive=True))]
    except psutil.Error:
        return []


class ActivityMeter:
    """Differences between readings of some processes. For one thread."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._last = {pid: of_process(pid) for pid in pids}

    def since(self) -> Since:
        """What was done since the last call, or the construction."""
        found: list[Since] = []
        for pid, before in self._last.items():
            now = self._last[pid] = of_process(pid)
            if before is not None and now is not None:
                found.append(Since(now.cpu_s - before.cpu_s, now.starved_s - before.starved_s, now.on_disk, now.ready))
        if not found:
            return Since()
        most = max(found, key=lambda since: since.cpu_s + since.starved_s)
        return most._replace(on_disk=any(f.on_disk for f in found), ready=any(f.ready for f in found))


def _cpu_s(folder: Path) -> float:
    """CPU time of a process with its threads that have ended, in the kernel's ticks."""
    stat = _stat(folder)
    return (int(stat[11]) + int(stat[12])) * _TICK_S


def _thread(folder: Path) -> tuple[str, float, float]:
    """State of a thread, and its seconds on a CPU and in its queue; zeros when it has ended meanwhile."""
    try:
        ran, waited = (folder / "schedstat").read_text(encoding="utf-8").split()[:2]
        return _stat(folder)[0], int(ran) * 1e-9, int(waited) * 1e-9
    except (OSError, IndexError, ValueError):
        return "", 0.0, 0.0


def _stat(folder: Path) -> list[str]:
    """Fields of proc(5)'s stat from the third on."""
    return (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _read_bytes(folder: Path) -> int:
    try:
        lines = (folder / "io").read_text(encoding="utf-8").splitlines()
        fields: dict[str, Any] = dict(line.split(": ") for line in lines)
        return int(fields["rchar"])
    except (OSError, KeyError, ValueError):
        return 0
