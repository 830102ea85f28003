"""The lock of a job's `train` command: one at a time trains the job.

The kernel releases it however its holder ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from elastic_rl.errors import ConfigError, DeadlineExceeded
from elastic_rl.host.cluster_lock import taken
from elastic_rl.runtime.waiting import wait_until


@contextmanager
def held(path: Path, job: str) -> Iterator[None]:
    """Holds the lock of a job, which is the file at ``path``. Raises ConfigError while another process holds it."""
    with path.open("a+") as lock:
        if not taken(lock):
            raise ConfigError(f"job {job} is already being trained by another process",
                              hint="wait for it, or name another job with --job=NAME")
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def is_held(path: Path) -> bool:
    """Whether a process trains the job."""
    try:
        with path.open() as lock:
            return not taken(lock, shared=True)
    except FileNotFoundError:
        return False


def end_holder(path: Path, *, timeout_s: float) -> int:
    """Ends the process of this machine that trains the job, as Ctrl-C does, and returns its id; 0 when there is none.
    It would start again what is stopped. Returns after ``timeout_s`` at the latest."""
    with contextlib.suppress(OSError, ValueError, psutil.Error), path.open() as lock:
        if taken(lock):
            return 0
        pid = int(lock.read())
        # In a folder that machines share the number may be that of another one's process.
        if pid == os.getpid() or not any(Path(opened.path) == path.resolve() for opened in
                                         psutil.Process(pid).open_files()):
            return 0
        os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(DeadlineExceeded):
            wait_until(lambda: taken(lock), timeout_s=timeout_s, what="the lock of the process that trains")
        return pid
    return 0
