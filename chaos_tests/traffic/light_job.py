"""``light_job [--pause-s S] [--go FILE] --context FILE --id NAME``: stands in the place of a job's driver, engines and
trainer.

It makes the steps of the job without anything to compute: publishes a version, writes the record of the step on its
host, and puts the metrics of the step and the job's status into etcd under the token of the driver. It begins behind
the last step that etcd has, and goes on when it is refused, or when anything of that cannot be done now
(``driver_writes.Writer``). Behind step ``HOLD`` it waits for the file of ``--go``, so that what happens to the job
happens within it, however slow the machine is.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from chaos_tests.history import Recorder
from chaos_tests.traffic.dcs import SteppedPublisher
from chaos_tests.traffic.driver_writes import Writer
from elastic_rl.config import ROLLOUT_POOL
from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd import run_stop
from elastic_rl.etcd.cluster_records import JobRecord, is_stopped
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.records import JobStatus, PoolSpec, PoolStatus, StepMetrics
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.etcd.transaction import Op
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.host.paths import JobPaths
from elastic_rl.pipeline.records.run_log import LineFile, RunLog
from elastic_rl.runtime.process import die_with_parent
from elastic_rl.runtime.waiting import wait_until

COMMAND = (sys.executable, "-m", "chaos_tests.traffic.light_job")
HOLD = 6
_STEP_S = 0.1
_STAGING_TTL_S = 10
_GO_S = 3600.0
"""Longest wait for the file of ``--go``: somebody has to make it."""


class LightJob:
    def __init__(self, ctx: RunContext, driver_id: str) -> None:
        self._ctx, self._keys, self._id = ctx, ctx.keys, driver_id
        self._writer = Writer(ctx, driver_id)
        self._log = RunLog(LineFile(JobPaths.of(ctx.config).steps))
        self._publisher: SteppedPublisher | None = None
        self._done, self._version = 0, 0
        self.over = False

    @property
    def waits(self) -> bool:
        """Whether it is at the step behind which it may have to wait."""
        return self._done == HOLD

    def go_on(self) -> None:
        """Begins, makes the next step, or ends the job, where that is possible now."""
        tried = False
        with self._writer.trying():
            if self._publisher is None:
                self._begin()
            elif self._stopped():
                run_stop.put_stop(self._writer.fenced(), self._keys)
                self.over = True
            elif self._done == self._ctx.config.train.steps:
                self._writer.put(*self._status("finished", self._done))
                self.over = True
            else:
                self._make(self._done + 1)
            tried = True
        if self._publisher is not None and (self.over or not tried):  # what it had under way may have been done, or not
            with contextlib.suppress(ElasticRLError):
                self._publisher.close()
            self._publisher = None

    def _begin(self) -> None:
        etcd, epoch = self._writer.etcd, self._writer.begun().epoch
        spec = readable_one(etcd.get(self._keys.pool_spec(ROLLOUT_POOL)), PoolSpec)
        engines = spec.desired if spec is not None else self._ctx.config.rollout.engines
        self._writer.put(
            *([] if spec is not None else [Op.put(self._keys.pool_spec(ROLLOUT_POOL), PoolSpec(
                name=ROLLOUT_POOL, desired=engines).encode())]),
            Op.put(self._keys.pool_status(ROLLOUT_POOL), PoolStatus(
                name=ROLLOUT_POOL, ready=engines, starting=0, draining=0).encode()))
        steps = etcd.range(self._keys.steps_prefix(), limit=1, newest_first=True)[0]
        self._done = max((metrics.step for metrics, _ in readable(steps, StepMetrics)), default=0)
        publisher = SteppedPublisher(etcd, self._keys, epoch, self._id, Recorder(), node="",
                                     replicas=self._ctx.config.dcs.replicas, staging_ttl_s=_STAGING_TTL_S,
                                     security=dcs_security(self._ctx.config))
        try:
            self._version = publisher.publish(self._done)
        except BaseException:
            publisher.close()
            raise
        # Its record stands for the version once the catalog has forgotten it.
        self._log.write("eval", step=self._done, eval_accuracy=0.5, policy_version=self._version)
        self._publisher = publisher

    def _make(self, step: int) -> None:
        assert self._publisher is not None
        began_with, self._version = self._version, self._publisher.publish(step)
        per_step = self._ctx.config.train.prompts_per_step
        groups = [*range(per_step * (step - 1), per_step * step)]
        self._log.write("step", step=step, samples=len(groups), tokens=10 * len(groups), groups=groups,
                        sample_versions=[began_with], reward_mean=0.5, policy_version=self._version,
                        seconds={"total": _STEP_S})
        metrics = StepMetrics(step=step, at=time.time(), reward=0.5, samples=len(groups), policy_version=self._version)
        self._writer.put(Op.put(self._keys.step_metrics(step), metrics.encode()), *self._status("rl", step))
        self._done = step

    def _stopped(self) -> bool:
        """Whether its operator has stopped it. Raises EtcdUnavailable."""
        found = self._writer.etcd.get(ClusterKeys(self._ctx.config.cluster_name).job(self._ctx.job))
        return is_stopped(readable_one(found, JobRecord), self._ctx.submission)

    def _status(self, phase: str, step: int) -> list[Op]:
        status = JobStatus(phase=phase, step=step, steps=self._ctx.config.train.steps)
        return [Op.put(self._keys.job_status(), status.encode())]


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--go", type=Path)
    parser.add_argument("--pause-s", type=float, default=_STEP_S)
    parser.add_argument("--context", required=True)
    parser.add_argument("--id", required=True)
    args = parser.parse_args()
    job = LightJob(RunContext.load(args.context), args.id)
    while not job.over:
        job.go_on()
        if args.go is not None and job.waits:
            wait_until(args.go.exists, timeout_s=_GO_S, poll_s=_STEP_S, what=f"the file {args.go}")
        time.sleep(args.pause_s)


if __name__ == "__main__":
    main()
