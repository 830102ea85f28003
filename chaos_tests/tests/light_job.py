"""``light_job.py GO --context FILE --id NAME``: stands in the place of a job's driver, engines and trainer.

It makes the steps of the job without anything to compute: publishes a version, writes the record of the step, and puts
its metrics and the job's status into etcd under the token of the driver. Behind step ``HOLD`` it waits for the file GO,
so that what happens to the job happens within it, however slow the machine is.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from chaos_tests.history import Recorder
from chaos_tests.traffic.dcs import SteppedPublisher
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.records import JobStatus, PoolSpec, PoolStatus, StepMetrics
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.etcd.transaction import Op
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.host.paths import JobPaths
from elastic_rl.pipeline.records.run_log import LineFile, RunLog
from elastic_rl.runtime.process import die_with_parent

HOLD = 6
_STEP_S = 0.1
_POOL = "rollout"


class LightJob:
    def __init__(self, ctx: RunContext, etcd: EtcdClient, driver_id: str) -> None:
        self._ctx, self._keys, cfg = ctx, ctx.keys, ctx.config
        token = fencing.assigned(ClusterKeys(cfg.cluster_name), ctx.job, ctx.assignment)
        epoch = fencing.raise_epoch(etcd, ctx.keys, driver_id, token).number
        generation = fencing.begin_driver(etcd, ctx.keys, epoch, driver_id, token)
        self._writer = FencedWriter.of_driver(etcd, ctx.keys, epoch, generation)
        self._publisher = SteppedPublisher(etcd, ctx.keys, epoch, driver_id, Recorder(), node="",
                                           security=dcs_security(cfg))
        self._log = RunLog(LineFile(JobPaths.of(cfg).steps))
        self._per_step = cfg.train.prompts_per_step
        engines = cfg.rollout.engines
        self._writer.write(Op.put(ctx.keys.pool_spec(_POOL), PoolSpec(name=_POOL, desired=engines).encode()),
                           Op.put(ctx.keys.pool_status(_POOL), PoolStatus(
                               name=_POOL, ready=engines, starting=0, draining=0).encode()))
        self._version = self._publisher.publish(0)

    def make(self, step: int) -> None:
        began_with, self._version = self._version, self._publisher.publish(step)
        groups = [*range(self._per_step * (step - 1), self._per_step * step)]
        self._log.write("step", step=step, samples=len(groups), tokens=10 * len(groups), staleness=0,
                        logprob_diff_max=0.0, groups=groups, sample_versions=[began_with], reward_mean=0.5,
                        policy_version=self._version, seconds={"total": _STEP_S})
        metrics = StepMetrics(step=step, at=time.time(), reward=0.5, samples=len(groups), policy_version=self._version)
        self._writer.write(Op.put(self._keys.step_metrics(step), metrics.encode()), *self._status("rl", step))

    def finish(self, step: int) -> None:
        self._publisher.close()
        self._writer.write(*self._status("finished", step))

    def _status(self, phase: str, step: int) -> list[Op]:
        status = JobStatus(phase=phase, step=step, steps=self._ctx.config.train.steps)
        return [Op.put(self._keys.job_status(), status.encode())]


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("go", type=Path)
    parser.add_argument("--context", required=True)
    parser.add_argument("--id", required=True)
    args = parser.parse_args()
    ctx = RunContext.load(args.context)
    with EtcdClient.from_config(ctx.config.etcd, ctx.etcd_endpoints) as etcd:
        job, steps = LightJob(ctx, etcd, args.id), ctx.config.train.steps
        for step in range(1, steps + 1):
            job.make(step)
            while step == HOLD and not args.go.exists():
                time.sleep(_STEP_S)
            time.sleep(_STEP_S)
        job.finish(steps)


if __name__ == "__main__":
    main()
