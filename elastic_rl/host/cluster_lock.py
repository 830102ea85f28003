"""The lock of a local cluster: only its holder starts or stops services, so that none is started beside a living one.

The kernel releases it however its holder ends. Services do not inherit it, so they never keep it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from elastic_rl.errors import DeadlineExceeded
from elastic_rl.runtime.waiting import wait_until


@contextmanager
def held(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Holds the lock of a cluster, the file at ``path``. ``timeout_s``: how long to wait for it; 0: not at all.

    Raises DeadlineExceeded while another command holds it, and FileNotFoundError where there is no such folder.
    """
    with path.open("w") as lock:
        try:
            wait_until(lambda: taken(lock), timeout_s=timeout_s, what="the cluster's lock")
        except DeadlineExceeded as e:
            raise DeadlineExceeded(f"another command is starting or stopping the services in {path.parent}",
                                   hint="wait for it to end, then try again") from e
        yield


def taken(lock: IO[Any], *, shared: bool = False) -> bool:
    """Whether this process has the lock of an opened file, which it takes if nobody has it. ``shared``: several may
    have it at once, and nobody the lock that is not shared."""
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
