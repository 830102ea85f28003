"""Ray for a test, in processes of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private import services

from elastic_rl.host import processes
from elastic_rl.host.ray_node import HOST_LABEL, RUN_HOST
from elastic_rl.runtime.process import RAY_PRIORITY

HERE = "here"
"""Name of the host of a test's Ray."""
_TRIES, _START_S = 4, 120.0
_PACKAGE = str(Path(ray.__file__).parent)
"""Ray's own processes are programs and scripts of its package."""


def start_ray(cpus: int, gpus: int = 0) -> None:
    """``gpus``: that Ray counts; nothing looks for them. A start that fails is tried again, as the driver does. Ray's
    workers have the priority of those that the driver starts, too."""
    os.environ |= RAY_PRIORITY
    for left in reversed(range(_TRIES)):
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(services, "get_node", _node_that_starts(services.get_node))
                ray.init(address="local", num_cpus=cpus, num_gpus=gpus, resources={RUN_HOST: 1000},
                         include_dashboard=False, labels={HOST_LABEL: HERE}, object_store_memory=80 << 20,
                         log_to_driver=False)
            return
        except Exception as e:
            end_ray()
            if not left or type(e) is not Exception:  # Ray raises this very class for a raylet that did not start
                raise


def _node_that_starts(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Ray's question for a node, which waits for one that is not there yet: Ray itself gives up after 30 seconds, a
    constant of its own, which a busy machine exceeds."""

    def get(*args: Any) -> Any:
        end = time.monotonic() + _START_S
        while True:
            try:
                return get_node(*args)
            except RuntimeError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.1)

    return get


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
