"""Ray for a test, in processes of its own."""

from __future__ import annotations

import os

import ray

from elastic_rl.driver.ray_start import end_ray
from elastic_rl.runtime.process import RAY_PRIORITY

_TRIES = 5


def start_ray(cpus: int, gpus: int = 0) -> None:
    """``gpus``: that Ray counts; nothing looks for them. Ray gives its processes 30 seconds to start, a constant of its
    own, which a busy machine exceeds; so it is tried again, as the driver does. Its workers have the priority of those
    that the driver starts, too."""
    os.environ |= RAY_PRIORITY
    for left in reversed(range(_TRIES)):
        try:
            ray.init(address="local", num_cpus=cpus, num_gpus=gpus, include_dashboard=False,
                     object_store_memory=80 << 20, log_to_driver=False)
            return
        except Exception as e:
            end_ray()
            if not left or type(e) is not Exception:  # Ray raises this very class for it
                raise
