"""Ray for the tests of the driver, with few enough CPUs that a test can fill it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import ray
from support.ray_cluster import start_ray

CPUS = 4


@pytest.fixture(scope="module")
def on_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # for the workers, which import the tests' actors
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        start_ray(CPUS)
    yield
    ray.shutdown()
