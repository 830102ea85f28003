"""``python -m elastic_rl.driver --context FILE``: the driver process of a run.

Order of a start: raise the epoch (which fences off every older driver and trainer) → Ray → router → trainer and engines
→ roles. Exit codes: 0 when the job's status is finished, 1 when it is failed; after any other end its supervisor starts
it again.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from elastic_rl import runtime
from elastic_rl.driver.compute import ComputePlane
from elastic_rl.errors import ElasticRLError, EtcdUnavailable
from elastic_rl.etcd import fencing
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import JobStatus
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.telemetry import logs, traces

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    runtime.die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", type=Path, required=True)
    parser.add_argument("--id", default=f"driver-{os.getpid()}", help="name under which it raises the epoch")
    args = parser.parse_args(argv)
    ctx = RunContext.load(args.context)
    logs.setup("driver", ctx.config.telemetry.log_level)
    traces.setup(ctx.config.telemetry.otlp_endpoint, "elastic-rl.driver")
    stop = threading.Event()
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: stop.set())
    try:
        return drive(ctx, args.id, stop)
    except ElasticRLError as e:
        log.exception("the driver stopped: %s", e)
        return 1


def drive(ctx: RunContext, driver_id: str, stop: threading.Event) -> int:
    """Runs until the job ends or ``stop`` is set; returns the exit code."""
    etcd = ctx.connect()
    epoch = fencing.raise_epoch(etcd, ctx.keys, holder=driver_id)
    ctx = ctx.model_copy(update={"epoch": epoch.number})
    member = Membership(etcd, ctx.keys, "driver", driver_id, ttl_s=ctx.config.coordinator.lease_ttl_s,
                        epoch=ctx.epoch).start()
    plane = ComputePlane(ctx, etcd, lambda phase: member.progress(0, phase))
    try:
        plane.start()
        while not stop.wait(ctx.config.coordinator.reconcile_interval_s):
            try:
                plane.reconcile()
                found = etcd.get(ctx.keys.job_status())
            except EtcdUnavailable as e:  # running work continues without etcd
                log.warning("reconcile aborted: %s", e)
                continue
            job = readable_one(found, JobStatus) or JobStatus(phase="")
            member.progress(job.step, job.phase)
            if job.phase in ("finished", "failed"):
                return 0 if job.phase == "finished" else 1
        return 0
    finally:
        plane.close()
        member.close()
        etcd.close()


if __name__ == "__main__":
    sys.exit(main())
