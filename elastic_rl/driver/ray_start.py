"""The end of Ray in the process that has started it, also where the start has failed."""

from __future__ import annotations

from pathlib import Path

import psutil
import ray

from elastic_rl.host import processes

_PACKAGE = str(Path(ray.__file__).parent)
"""Ray's own processes are programs and scripts of its package."""


def end_ray() -> None:
    """Ends Ray and every process of it that this process has started. ``ray.shutdown`` ends nothing of a start that
    timed out: its GCS, monitor and raylet would run on, and make the next start slower still."""
    ray.shutdown()
    processes.kill(child for child in psutil.Process().children(recursive=True) if _is_of_ray(child))


def _is_of_ray(process: psutil.Process) -> bool:
    try:
        return any(_PACKAGE in word for word in process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False
