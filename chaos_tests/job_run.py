"""One run of a job on a cluster of its own under a schedule of faults, and the evidence that it leaves."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from support.whole_run import Job, whole_job

from chaos_tests.faults.catalogue import plan_of
from chaos_tests.nemesis.schedule import Schedule
from chaos_tests.validate.run import Evidence
from elastic_rl.coordinator.alerts.state_machine import Alert, Phase
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import DeadlineExceeded
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.runtime.waiting import wait_until

_ALERTS_END_S = 60.0
"""Time for the alerts of faults that are over to end too: each has a hold of its own."""
SETTINGS: dict[str, Any] = {
    "rollout.engines": 1, "train.state_every_steps": 3, "train.prompts_per_step": 8, "train.group_size": 4,
    "train.updates_per_step": 1, "sft.max_steps": 0, "data.options.operand_below": 30, "trainer.tensor_parallel": 1,
    "trainer.data_parallel": 1, "coordinator.replicas": 2}
"""A job that a machine of two cores trains while its parts are killed."""


def run(folder: Path, schedule: Schedule) -> Evidence:
    """Runs the job from its start to its end, and takes its cluster down. Raises AssertionError where it fails."""
    with whole_job(folder, {**SETTINGS, "train.steps": schedule.steps}) as job:
        report = job.run(plan_of(schedule))
        alerts = _alerts(job)
        committed = [metrics.step for metrics in job.step_metrics()]
        job.cluster.down()
        return Evidence(schedule, report, job.step_records(), committed, job.cfg.train.max_staleness, alerts,
                        job.leftovers())


def _alerts(job: Job) -> list[Alert]:
    """Once all have ended, or for so long that one that has not will not."""
    with EtcdClient(ClusterInfo.load(job.cluster.paths.info).etcd_endpoints, call_timeout_s=2.0) as etcd:
        def read() -> list[Alert]:
            return [Alert.decode(kv.value) for kv in etcd.range(Keys(job.cfg.job).alerts_prefix())[0]]

        with contextlib.suppress(DeadlineExceeded):
            wait_until(lambda: all(alert.phase is Phase.RESOLVED for alert in read()), timeout_s=_ALERTS_END_S,
                       what="the end of all alerts")
        return read()
