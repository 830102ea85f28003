"""The lock of a job's `train` command: one at a time trains the job and keeps the services of its cluster running.

The kernel releases it however its holder ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

from elastic_rl.errors import ConfigError

FILE = "train.lock"
_POLL_S = 0.2


@contextmanager
def held(cluster_dir: Path, job: str) -> Iterator[None]:
    """Raises ConfigError while another process holds it."""
    with (cluster_dir / FILE).open("a+") as lock:
        if not _taken(lock):
            raise ConfigError(f"job {job} is already being trained by another process",
                              hint="wait for it, or name another job with --job=NAME")
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def end_holder(cluster_dir: Path, *, timeout_s: float) -> int:
    """Ends the process of this machine that trains the job, as Ctrl-C does, and returns its id; 0 when there is none.
    It would start again what is stopped. Returns after ``timeout_s`` at the latest."""
    path = cluster_dir / FILE
    with contextlib.suppress(OSError, ValueError, psutil.Error), path.open() as lock:
        if _taken(lock):
            return 0
        pid = int(lock.read())
        # In a folder that machines share the number may be that of another one's process.
        if pid == os.getpid() or not any(Path(opened.path) == path.resolve() for opened in
                                         psutil.Process(pid).open_files()):
            return 0
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while not _taken(lock) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return pid
    return 0


def _taken(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
