"""``python -m elastic_rl.driver --context FILE``: the driver process of a run.

A driver takes over where the Ray of the epoch was started and not ended: it begins the next generation, which fences
off the drivers before it, adopts what runs as it is, and starts the rest again. Otherwise it raises the epoch, which
fences off every older driver and trainer, and starts everything: Ray → router → trainer and engines → roles. Exit
codes: 0 when the job's status is finished, 1 when it is failed or stopped; after any other end its supervisor starts
the next driver.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray

from elastic_rl.driver.compute import ComputePlane
from elastic_rl.driver.etcd_patience import Stopped, patiently
from elastic_rl.errors import (
    ComputePlaneLost,
    Conflict,
    ElasticRLError,
    EtcdUnavailable,
    Fenced,
    RayNodeLost,
    SharedDevicesLost,
)
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import ENDED_PHASES, JobStatus
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.compute_services import ray_epoch
from elastic_rl.host.here import context_here, heartbeats_here
from elastic_rl.host.paths import JobPaths
from elastic_rl.runtime.process import die_with_parent
from elastic_rl.telemetry import logs, traces

log = logging.getLogger(__name__)

_LOG_EVERY_S = 30.0
"""An outage of etcd is logged at most this often."""


def main(argv: list[str] | None = None) -> int:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", type=Path, required=True)
    parser.add_argument("--id", default=f"driver-{os.getpid()}", help="name under which it raises the epoch")
    args = parser.parse_args(argv)
    ctx = context_here(RunContext.load(args.context))
    logs.setup("driver", ctx.config.telemetry.log_level)
    traces.setup(ctx.config.telemetry.otlp_endpoint, "elastic-rl.driver")
    stop = threading.Event()
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: stop.set())
    code = 1
    try:
        code = drive(ctx, args.id, stop)
    except SharedDevicesLost as e:
        log.warning("the driver ends: %s", e)
        code = e.EXIT_CODE
    except ElasticRLError as e:
        log.exception("the driver stopped: %s", e)
    if ray.is_initialized():  # it does not work, or a call does not end: Ray's own end would wait for it
        logging.shutdown()
        os._exit(code)
    return code


def drive(ctx: RunContext, driver_id: str, stop: threading.Event) -> int:
    """Runs until the job ends or ``stop`` is set, and ends the compute plane with it; returns the exit code. An outage
    of etcd, also before the first pass, is waited out. Raises Fenced when a newer driver has begun, ComputePlaneLost,
    after it has ended what is left, RayNodeLost and ConfigError. What else ends a driver leaves everything to the next
    one."""
    with contextlib.ExitStack() as held:
        etcd = ctx.connect()
        held.callback(etcd.close)
        try:
            epoch, generation, adopts = patiently(lambda: _begin(etcd, ctx, driver_id), pause=stop.wait)
            ctx = ctx.model_copy(update={"epoch": epoch, "generation": generation})
            member = patiently(
                lambda: Membership(etcd, ctx.keys, "driver", driver_id, epoch=ctx.epoch,
                                   ttl_s=ctx.config.coordinator.lease_ttl_s,
                                   heartbeats=heartbeats_here(ctx.config)).start(), pause=stop.wait)
        except Stopped:
            return 0
        held.callback(member.close)
        plane = ComputePlane(ctx, etcd, lambda phase: member.progress(0, phase), stop.wait, adopts=adopts)
        held.callback(plane.leave)
        try:
            plane.start()
            code = _reconcile(ctx, etcd, member, plane, stop)
        except Stopped:
            code = 0
        except ComputePlaneLost as e:
            plane.close(lost=e.message)
            raise
        plane.close()
        return code


def _begin(etcd: EtcdClient, ctx: RunContext, driver_id: str) -> tuple[int, int, bool]:
    """Begins as the driver of the job; returns epoch and generation, and whether another driver has begun this epoch.
    Raises EtcdUnavailable, Conflict, and Fenced where the job is assigned again."""
    token = fencing.assigned(ClusterKeys(ctx.config.cluster_name), ctx.job, ctx.assignment)
    epoch = fencing.current_epoch(etcd, ctx.keys)
    if epoch and ray_epoch(JobPaths.of(ctx.config)) == epoch:
        with contextlib.suppress(Fenced):  # it was ended meanwhile, for a global restart
            return epoch, fencing.begin_driver(etcd, ctx.keys, epoch, driver_id, token), True
    epoch = fencing.raise_epoch(etcd, ctx.keys, driver_id, token).number
    try:
        return epoch, fencing.begin_driver(etcd, ctx.keys, epoch, driver_id, token), False
    except Fenced as e:
        raise Conflict(f"epoch {epoch} was ended while a driver began it") from e  # try once more


def _reconcile(ctx: RunContext, etcd: EtcdClient, member: Membership, plane: ComputePlane,
               stop: threading.Event) -> int:
    """The loop. Only Fenced, ``stop``, the end of the job and the loss of Ray, or of its node here, end it."""
    job = JobStatus(phase="starting")
    silent_since, logged = 0.0, float("-inf")
    while not stop.wait(ctx.config.coordinator.reconcile_interval_s):
        try:
            plane.reconcile()
            found = etcd.get(ctx.keys.job_status())
            report: dict[str, Any] = {"faults": plane.faults, "waiting": plane.waiting}
        except EtcdUnavailable as e:  # running work continues without etcd
            now = time.monotonic()
            silent_since = silent_since or now
            if now - logged >= _LOG_EVERY_S:
                logged = now
                log.warning("waiting for etcd, for %.0f s so far: %s", now - silent_since, e)
            # The first heartbeat after the outage may come before the first pass, and must not look like a hang.
            member.progress(job.step, job.phase)
            continue
        except (Fenced, ComputePlaneLost, RayNodeLost):
            raise
        except Exception:  # a bug: the next driver would meet it too, and this one still keeps everything running
            log.exception("a reconcile pass failed")
            continue
        if silent_since:
            log.warning("etcd answers again, after %.0f s", time.monotonic() - silent_since)
            silent_since, logged = 0.0, float("-inf")
        job = readable_one(found, JobStatus) or JobStatus(phase="")
        member.progress(job.step, job.phase, **report)
        if job.phase in ENDED_PHASES:
            return 0 if job.phase == "finished" else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
