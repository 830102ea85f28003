"""Which processes of this machine are those of a job: real ones, since the kernel has their environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from elastic_rl import config
from elastic_rl.faults.context import FaultContext
from elastic_rl.host.compute_services import compute_services, router_service
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.processes import RUN_MARK, stop
from elastic_rl.runtime.waiting import wait_until

_WAITS = [sys.executable, "-c", "import signal; signal.pause()"]


def test_processes_of_a_job_are_found_whichever_driver_has_started_them(tmp_path: Path) -> None:
    cfg = config.parse({"job": "j", "run_dir": str(tmp_path)})
    nothing: Any = None
    context, job = FaultContext(cfg, nothing, nothing, nothing), JobPaths.of(cfg)
    assert context.router_pid() == 0
    router = compute_services(job).start(router_service("rollout"), _WAITS, log=job.log("router"),
                                         env={RUN_MARK: str(job.private)})
    other = subprocess.Popen(_WAITS, env={RUN_MARK: "another job"})
    try:
        assert context.router_pid() == router and context.router_pid("judge") == 0
        wait_until(lambda: [p.pid for p in context.processes()] == [router], timeout_s=30.0, what="its environment")
    finally:
        stop(router)
        other.kill()
        other.wait()
    assert context.router_pid() == 0
