"""Ray for a test, in processes of its own."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import ray

from elastic_rl.host import processes
from elastic_rl.host.ray_node import HOST_LABEL, RUN_HOST
from elastic_rl.runtime.process import RAY_PRIORITY

HERE = "here"
"""Name of the host of a test's Ray."""
_TRIES = 5
_PACKAGE = str(Path(ray.__file__).parent)
"""Ray's own processes are programs and scripts of its package."""


def start_ray(cpus: int, gpus: int = 0) -> None:
    """``gpus``: that Ray counts; nothing looks for them. Ray gives its processes 30 seconds to start, a constant of its
    own, which a busy machine exceeds; so it is tried again, as the driver does. Its workers have the priority of those
    that the driver starts, too."""
    os.environ |= RAY_PRIORITY
    for left in reversed(range(_TRIES)):
        try:
            ray.init(address="local", num_cpus=cpus, num_gpus=gpus, resources={RUN_HOST: 1000}, include_dashboard=False,
                     labels={HOST_LABEL: HERE}, object_store_memory=80 << 20, log_to_driver=False)
            return
        except Exception as e:
            end_ray()
            if not left or type(e) is not Exception:  # Ray raises this very class for it
                raise


def end_ray() -> None:
    """Ends Ray and every process of it that this process has started. ``ray.shutdown`` ends nothing of a start that
    timed out."""
    ray.shutdown()
    processes.kill(child for child in psutil.Process().children(recursive=True) if _is_of_ray(child))


def _is_of_ray(process: psutil.Process) -> bool:
    try:
        return any(_PACKAGE in word for word in process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False
