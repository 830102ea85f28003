"""A job on a cluster of its own, as ``elastic-rl train`` runs it."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from elastic_rl import config, train
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Event, StepMetrics
from elastic_rl.faults.injector import FaultPlan
from elastic_rl.host import leftovers, processes
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import JobPaths
from elastic_rl.report.build import Record, read_records
from support.otlp_collector import Collector, collecting


class Job:
    """One job on a cluster of its own, in a folder of its own."""

    def __init__(self, run_dir: Path, settings: dict[str, Any], spans: Collector) -> None:
        self.spans = spans
        self.cfg = config.load(overrides=[
            f"--job=e2e-{secrets.token_hex(4)}", f"--run_dir={run_dir}", "--train.eval_every_steps=1000",
            f"--telemetry.otlp_endpoint={spans.endpoint}",
            *(f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items())])
        self.cluster = Cluster(self.cfg)

    def run(self, plan: FaultPlan | None = None) -> dict[str, Any]:
        """Trains to the end and returns report.json."""
        info = self.cluster.up()
        code = train.run(self.cluster.cfg, info, **({"faults": True, "fault_plan": plan} if plan else {}))
        assert code == 0, f"the run failed; its logs are in {JobPaths.of(self.cluster.cfg).logs}"
        return json.loads(JobPaths.of(self.cluster.cfg).report.read_text())

    def step_records(self) -> list[Record]:
        """The records of each step, as often as it was done."""
        records = read_records(JobPaths.of(self.cluster.cfg).steps)
        return [record for record in records if record["kind"] == "step"]

    def step_metrics(self) -> list[StepMetrics]:
        """The records that etcd has, of the cluster that is up."""
        with EtcdClient(ClusterInfo.load(self.cluster.paths.info).etcd_endpoints, call_timeout_s=2.0) as etcd:
            return [StepMetrics.decode(kv.value) for kv in etcd.range(Keys(self.cfg.job).steps_prefix())[0]]

    def events(self) -> list[Event]:
        """All of the cluster that is up."""
        with EtcdClient(ClusterInfo.load(self.cluster.paths.info).etcd_endpoints, call_timeout_s=2.0) as etcd:
            return events.recent(etcd, Keys(self.cfg.job), 2000)

    def epoch(self) -> int:
        with EtcdClient(ClusterInfo.load(self.cluster.paths.info).etcd_endpoints, call_timeout_s=2.0) as etcd:
            return fencing.current_epoch(etcd, Keys(self.cfg.job))

    def leftovers(self) -> list[str]:
        """What should be gone once the cluster is down."""
        run = str(JobPaths.of(self.cluster.cfg).private)
        mine = [p for p in psutil.process_iter(["cmdline"]) if self.cfg.job in " ".join(p.info["cmdline"] or [])]
        return [*(f"process {p.pid}" for p in [*mine, *processes.marked(run)]),
                *map(str, Path("/dev/shm").glob(f"*{self.cfg.job}*")),
                *map(str, leftovers.tagged_files(JobPaths.of(self.cluster.cfg).file_tag())),
                *([str(temp)] if (temp := JobPaths.of(self.cluster.cfg).temp).exists() else [])]


@contextlib.contextmanager
def whole_job(run_dir: Path, settings: dict[str, Any]) -> Iterator[Job]:
    """A job whose cluster is down at the end, whatever happens."""
    with collecting() as spans:
        job = Job(run_dir, settings, spans)
        try:
            yield job
        finally:
            job.cluster.down(purge=True)
            leftovers.sweep(JobPaths.of(job.cluster.cfg))


def assert_sound(job: Job, report: dict[str, Any], steps: int) -> None:
    """What holds after every run, whatever happened to it (I3, I4, I5). Steps that were done again count too."""
    assert report["steps"] == steps and [m.step for m in job.step_metrics()] == list(range(1, steps + 1))
    assert report["groups_lost"] == 0 and report["groups_duplicated"] == 0 and report["audit_problems"] == []
    assert report["versions_committed"] > steps
    bound = job.cfg.train.max_staleness
    records = job.step_records()
    assert [r["step"] for r in records if r["staleness"] > bound] == []
    # Others have samples of other weights than those that they are compared with. Of a step that was committed when
    # its loop ended, the next loop writes the record, and does not know what the trainer had measured.
    fresh = [r["logprob_diff_max"] for r in records if r["staleness"] == 0 and r["logprob_diff_max"] is not None]
    assert fresh and max(fresh) <= 1e-4


def assert_recovered(faults: Iterable[dict[str, Any]], witness: str) -> None:
    """Faults of a report were seen to happen, were detected, and the run recovered from each. ``witness``: what those
    who saw it say."""
    for fault in faults:
        assert witness in fault["witness"], fault
        detected_at = fault["detected_at"] or (fault["may_go_unnoticed"] and fault["injected_at"])
        assert detected_at and fault["healed_at"], fault
        assert fault["injected_at"] <= detected_at <= fault["healed_at"]


def fault_of(report: dict[str, Any], name: str) -> dict[str, Any]:
    """A fault of a report, which was seen to happen, was detected, and from which the run recovered."""
    fault = next((f for f in report["faults"] if f["name"] == name), None)
    assert fault is not None, f"{name} did not happen: the run took its {report['steps']} steps before its turn"
    assert fault["witness"], "the fault must have been seen to happen"
    assert_recovered([fault], "")
    return fault
