"""What Linux says about the processes and the load of this machine.

A process is named by its pid and the time at which it started, so that a pid which is used again is not mistaken for
it. All of it is read from /proc; where there is none, nothing is known.
"""

from __future__ import annotations

import os
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"


class ProcessState(StrEnum):
    RUNNING = "running"
    """It exists; whether it does anything is another question."""
    STOPPED = "stopped"
    """Stopped by a signal (SIGSTOP) or a debugger: none of its threads runs."""
    GONE = "gone"
    """It has ended; that its parent has not waited for it (a zombie) makes no difference."""
    UNKNOWN = "unknown"
    """This process may not look at it."""


_STATES = {"T": ProcessState.STOPPED, "t": ProcessState.STOPPED, "Z": ProcessState.GONE, "X": ProcessState.GONE,
           "x": ProcessState.GONE}


class Sighting(NamedTuple):
    """One look at a process."""

    state: ProcessState
    ran: int = 0
    """Grows whenever the process runs, if only for a moment. Says nothing on its own."""


@cache
def machine_id() -> str:
    """Names the set of processes that this process can see: this boot of this machine, and the pid namespace. Empty
    where the kernel does not tell."""
    try:
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()}.{os.stat(_PROC / 'self/ns/pid').st_ino}"
    except OSError:
        return ""


def start_ticks(pid: int) -> int:
    """When a process of this machine started, in clock ticks since the boot; 0 if unknown."""
    try:
        return int(_stat(pid)[19])
    except (OSError, ValueError, IndexError):
        return 0


def look_at(pid: int, started: int) -> Sighting:
    """The process that has this pid and started at ``started`` (``start_ticks``)."""
    try:
        stat = _stat(pid)
        state, ran, since = stat[0], int(stat[11]) + int(stat[12]), int(stat[19])
    except (FileNotFoundError, ProcessLookupError):
        # The files of other users' processes may be hidden (hidepid).
        return Sighting(ProcessState.UNKNOWN if _exists(pid) else ProcessState.GONE)
    except (OSError, ValueError, IndexError):
        return Sighting(ProcessState.UNKNOWN)
    if since != started:
        return Sighting(ProcessState.GONE)
    return Sighting(_STATES.get(state, ProcessState.RUNNING), ran + _times_scheduled(pid))


def load_per_core() -> float:
    """Threads that run or want to, per core of this machine, over the last minute; 0 if unknown."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return 0.0


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on, the state; the second, the name, may hold anything."""
    return (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _times_scheduled(pid: int) -> int:
    """How often the main thread was given a core; 0 where the kernel does not count."""
    try:
        return int((_PROC / str(pid) / "schedstat").read_text(encoding="utf-8").split()[2])
    except (OSError, ValueError, IndexError):
        return 0


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
