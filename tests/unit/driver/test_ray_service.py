"""Which Ray a driver ends. The service is a real process, which stands for Ray."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elastic_rl import config
from elastic_rl.driver.ray_service import RayService
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import processes
from elastic_rl.host.compute_services import RAY, compute_services, ray_epoch
from elastic_rl.host.paths import JobPaths
from elastic_rl.net.addresses import LOOPBACK

_WAITS = [sys.executable, "-c", "import signal; signal.pause()"]


@pytest.mark.parametrize(("epoch", "is_ended"), [(2, False), (3, True), (4, True)])
def test_driver_ends_the_ray_of_its_epoch_and_of_earlier_ones(tmp_path: Path, epoch: int, is_ended: bool) -> None:
    cfg = config.parse({"job": "j", "run_dir": str(tmp_path)})
    job = JobPaths.of(cfg)
    service = RayService(RunContext(config=cfg, etcd_endpoints=["127.0.0.1:1"], job="j", epoch=epoch, model_dir="",
                                    host=LOOPBACK))
    pid = compute_services(job).start(RAY, _WAITS, log=job.log(RAY), generation=3)
    try:
        assert ray_epoch(job) == 3 and service.runs == (epoch == 3)
        service.end(forget=False)
        assert ray_epoch(job) == (0 if is_ended else 3)
        assert compute_services(job).get(RAY) is not None, "it is known that the epoch had one"
        service.end()
        assert (compute_services(job).get(RAY) is None) == is_ended
    finally:
        processes.stop(pid)
