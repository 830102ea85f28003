"""``stub_driver.py BEHAVIOUR --context FILE --id NAME``: begins an epoch as a driver does, and then does nothing.

BEHAVIOUR: ``works`` ends when its epoch is over, as the driver does, or when the job has finished; ``hangs`` ends only
by a signal; ``hangs-until-finished`` ends when the job has finished; etcd may be away meanwhile; ``crashes`` ends by
itself before it begins an epoch, ``crashes-later`` after it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd import fencing
from elastic_rl.etcd.records import JobStatus
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.paths import JobPaths
from elastic_rl.runtime.process import die_with_parent

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
    with ctx.connect() as etcd:
        epoch = fencing.raise_epoch(etcd, ctx.keys, holder=args.id).number
        if args.behaviour == "crashes-later":
            sys.exit(1)
        while True:
            if args.behaviour == "hangs-until-finished":
                with contextlib.suppress(EtcdUnavailable):
                    found = etcd.get(ctx.keys.job_status())
                    if found is not None and JobStatus.decode(found.value).phase == "finished":
                        sys.exit(0)
            if args.behaviour == "works":
                found = etcd.get(ctx.keys.job_status())
                if found is not None and JobStatus.decode(found.value).phase == "finished":
                    sys.exit(0)
                if fencing.current_epoch(etcd, ctx.keys) > epoch:
                    sys.exit(1)
            time.sleep(0.02)
