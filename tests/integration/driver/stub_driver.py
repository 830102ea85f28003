"""``stub_driver.py BEHAVIOUR --context FILE --id NAME``: takes over what runs, or begins an epoch, as a driver does;
registers, and then does nothing.

BEHAVIOUR: ``works`` ends when its epoch is over, as the driver does, or when the job has finished; ``hangs`` ends only
by a signal; ``crashes`` ends by itself before it begins an epoch, ``crashes-later`` after it, and before it registers;
``loses-hosts`` ends as one whose shared hosts are lost.
``hangs-until-finished`` is for whole runs, in which other tests than those of a take-over need a driver: it begins an
epoch, starts nothing, and ends when the job has finished; etcd may be away meanwhile. ``writes-until-finished`` also
writes as a driver, without end, and goes on when it is refused (``chaos_tests.traffic.driver_writes``).
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time

import psutil

from chaos_tests.traffic import driver_writes
from elastic_rl.errors import EtcdUnavailable, SharedDevicesLost
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import JobStatus
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.paths import JobPaths
from elastic_rl.runtime.process import die_with_parent


def begin(ctx: RunContext, etcd: EtcdClient, driver_id: str) -> int:
    """The epoch of the driver: the present one, where the process that stands for Ray runs in it."""
    folder, epoch = JobPaths.of(ctx.config).private, fencing.current_epoch(etcd, ctx.keys)
    ray = folder / f"ray-{epoch}"
    if ray.exists() and psutil.pid_exists(int(ray.read_text())):
        return epoch
    epoch = fencing.raise_epoch(etcd, ctx.keys, holder=driver_id).number
    detached = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (folder / f"ray-{epoch}").write_text(str(detached.pid))
    return epoch


def status(ctx: RunContext, etcd: EtcdClient) -> str:
    found = etcd.get(ctx.keys.job_status())
    return JobStatus.decode(found.value).phase if found is not None else ""


if __name__ == "__main__":
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour")
    parser.add_argument("--context", required=True)
    parser.add_argument("--id", required=True)
    args = parser.parse_args()
    ctx = RunContext.load(args.context)
    with (JobPaths.of(ctx.config).private / "starts").open("a") as starts:
        starts.write(f"{args.id}\n")
    if args.behaviour == "crashes":
        sys.exit(1)
    if args.behaviour == "loses-hosts":
        sys.exit(SharedDevicesLost.EXIT_CODE)
    if args.behaviour == "writes-until-finished":
        driver_writes.write_until_finished(ctx, args.id)
        sys.exit(0)
    with ctx.connect() as etcd:
        if args.behaviour == "hangs-until-finished":
            fencing.raise_epoch(etcd, ctx.keys, holder=args.id)
            while True:
                with contextlib.suppress(EtcdUnavailable):
                    if status(ctx, etcd) == "finished":
                        sys.exit(0)
                time.sleep(0.02)
        epoch = begin(ctx, etcd, args.id)
        if args.behaviour == "crashes-later":
            sys.exit(1)
        with Membership(etcd, ctx.keys, "driver", args.id, epoch=epoch, ttl_s=2).start():
            while True:
                if args.behaviour == "works":
                    if status(ctx, etcd) in ("finished", "stopped"):
                        sys.exit(0)
                    if fencing.current_epoch(etcd, ctx.keys) > epoch:
                        sys.exit(1)
                time.sleep(0.02)
