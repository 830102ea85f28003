"""One run of a job on a cluster of its own under a schedule of faults, and the log of it."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from support.whole_run import Job, whole_job

from chaos_tests.event_log import FORM, Event, Kind
from chaos_tests.faults.catalogue import plan_of
from chaos_tests.nemesis.schedule import Schedule
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


def run(folder: Path, schedule: Schedule) -> list[Event]:
    """Runs the job from its start to its end, and takes its cluster down; returns the log of that. Raises
    AssertionError where it fails."""
    log = list[Event]()
    with whole_job(folder, {**SETTINGS, "train.steps": schedule.steps}) as job:
        log.append({"kind": Kind.RUN, "at": time.time(), "form": FORM, "scenario": "", "seed": schedule.seed,
                    "schedule": json.loads(schedule.to_json()), "target": "one host", "baseline": False,
                    "settings": job.cfg.model_dump(mode="json")})
        report = job.run(plan_of(schedule))
        alerts = [json.loads(alert.encode()) for alert in _alerts(job)]
        committed = [metrics.step for metrics in job.step_metrics()]
        log += [record | {"kind": Kind.STEP} for record in job.step_records()]
        log += [fault | {"kind": Kind.FAULT} for fault in report["faults"]]
        job.cluster.down()
        log += [{"kind": Kind.LEFTOVER, "what": what} for what in job.leftovers()]
        log.append({"kind": Kind.END, "phase": report["status"], "report": report, "alerts": alerts,
                    "committed_steps": committed, "aborted": ""})
    return log


def _alerts(job: Job) -> list[Alert]:
    """Once all have ended, or for so long that one that has not will not."""
    with EtcdClient(ClusterInfo.load(job.cluster.paths.info).etcd_endpoints, call_timeout_s=2.0) as etcd:
        def read() -> list[Alert]:
            return [Alert.decode(kv.value) for kv in etcd.range(Keys(job.cfg.job).alerts_prefix())[0]]

        with contextlib.suppress(DeadlineExceeded):
            wait_until(lambda: all(alert.phase is Phase.RESOLVED for alert in read()), timeout_s=_ALERTS_END_S,
                       what="the end of all alerts")
        return read()
