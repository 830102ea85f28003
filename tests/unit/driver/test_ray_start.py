"""A start of Ray that times out, with its real processes: nothing of it runs beside the next one."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
import ray
from ray._private import services

from elastic_rl.driver.ray_start import end_ray


def test_start_that_timed_out_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_up(*_: object) -> None:
        raise TimeoutError("as Ray does after 30 s, when the raylet has not registered")

    before = {child.pid for child in psutil.Process().children()}
    other = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        monkeypatch.setattr(services, "get_node", gives_up)
        with pytest.raises(TimeoutError, match="raylet has not registered"):
            ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=80 << 20)
        names = {child.name() for child in psutil.Process().children()}
        assert "gcs_server" in names and "raylet" in names, "it was started"
        end_ray()
        assert {child.pid for child in psutil.Process().children()} <= before | {other.pid}
        assert other.poll() is None
    finally:
        end_ray()
        other.kill()
        other.wait()
