"""A cluster with a name: any number of jobs are on it at once, and it outlives them."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import psutil
import pytest
from support.commands import run_in_one_line as _run
from support.stub_run import put_stub_in_place
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.errors import ConfigError, EtcdUnavailable, PreflightFailed
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import JobPhase, driver_of
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.host import cluster_settings, processes
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import JobPaths, named_clusters_up
from elastic_rl.host.processes import OWNER_ENV

_A, _B = (f"{name}-{secrets.token_hex(3)}" for name in "ab")


class Lab:
    """A cluster with a name that is up, and commands that address it."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "runs"
        self.at, self.parallel_jobs = [f"--run_dir={self.run_dir}"], 1
        self.cluster = self.of("")

    def of(self, job: str, **settings: object) -> Cluster:
        """The cluster with a job; "": with no job of its own."""
        return Cluster(config.parse({**({"job": job} if job else {}), "run_dir": str(self.run_dir), "cluster": "lab",
                                     "coordinator": {"replicas": 1, "parallel_jobs": self.parallel_jobs},
                                     "dcs": {"arena_bytes": 32 << 20}, **settings}))

    def pid(self, service: str) -> int:
        found = {unquote(r.name): r.pid for files in (self.cluster.services, self.cluster.singletons)
                 for r in files.running()}
        return found.get(service, 0)

    def etcd(self) -> EtcdClient:
        return EtcdClient(self.cluster.connect().etcd_endpoints, call_timeout_s=2.0)

    def served(self) -> set[str]:
        """The jobs that the coordinators serve."""
        return {job["name"] for job in AdminClient(self.of(_A).connect()).jobs()}

    def await_driver(self, job: str) -> None:
        wait_until((JobPaths.of(self.of(job).cfg).private / "starts").exists, what=f"the driver of {job}")

    def events(self, job: str) -> list[str]:
        with self.etcd() as etcd:
            return [e.kind for e in events.recent(etcd, Keys(job))]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    out = Lab(tmp_path)
    out.cluster.up()
    try:
        yield out
    finally:
        out.cluster.down()


def test_jobs_run_beside_one_another_and_each_of_their_services_comes_back(
        lab: Lab, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_stub_in_place(tmp_path, monkeypatch)
    settings = ["--cluster=lab", *lab.at, "--dcs.arena_bytes=33554432"]
    for job in (_A, _B):
        code, said = _run(capsys, "train", "--detach", f"--job={job}", *settings)
        assert code == 0 and f"elastic-rl attach --job={job}" in said
    lab.await_driver(_A)
    queued = next(row for row in json.loads(_run(capsys, "jobs", *lab.at, "-o", "json")[1]) if row["job"] == _B)
    assert queued["state"] == "queued" and f"waits for {_A}: one job runs at a time" in queued["message"]
    assert not lab.pid(driver_of(_B))
    assert _run(capsys, "up", "--cluster=lab", *lab.at, "--coordinator.parallel_jobs=2")[0] == 0
    lab.await_driver(_B)
    assert lab.served() == {_A, _B}
    old = {name: lab.pid(name) for name in (lab.of(_B).node, lab.of(_B).run.name, "coordinator-0")}
    for name, pid in old.items():
        psutil.Process(pid).kill()
        wait_until(lambda name=name, pid=pid: lab.pid(name) not in (0, pid), what=f"another {name}")
    wait_until(lambda: {"dcs.restarted", "run.restarted", "coordinator.restarted"} <= set(lab.events(_B)),
               what="the events of the second job")
    wait_until(lambda: "coordinator.restarted" in lab.events(_A), what="the event of what both use")
    assert not {"dcs.restarted", "run.restarted"} & set(lab.events(_A))
    assert lab.events(_B).count("run.restarted") == 1, "the first start of a queued run is none"

    rows = json.loads(_run(capsys, "jobs", *lab.at, "-o", "json")[1])
    assert {row["job"]: row["state"] for row in rows} == {_A: "running", _B: "running"}
    code, said = _run(capsys, "stop", *lab.at)
    assert code == Exit.USAGE and _A in said and _B in said and "name one with --job=NAME" in said
    code, said = _run(capsys, "down", f"--job={_A}", *lab.at)
    assert code == Exit.USAGE and f"elastic-rl stop --job={_A}" in said and "down --cluster=lab" in said
    assert _run(capsys, "up", "--cluster=lab", *lab.at, "--coordinator.parallel_jobs=1")[0] == 0
    code, said = _run(capsys, "stop", _A, *lab.at)
    assert code == 0 and f"stopped: {driver_of(_A)}" in said
    assert lab.of(_A).run.read().phase is JobPhase.STOPPED and lab.of(_B).run.read().phase is JobPhase.RUNNING

    code, said = _run(capsys, "down", "--cluster=lab", *lab.at)
    assert code == 0 and driver_of(_B) in said and f"dcs-{_A}" in said
    assert said.count("etcd of cluster lab") == 2, "what each job keeps"
    assert not processes.marked(str(lab.cluster.dir), OWNER_ENV)
    assert not JobPaths.of(lab.of(_B).cfg).secret_files() and lab.cluster.jobs == []


def test_named_cluster_starts_without_a_job_and_admits_each_with_settings_of_its_own(
        lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert [r.name for r in lab.cluster.services.running()] == ["coordinator-0", "etcd-0"]
    assert not (lab.run_dir / "quickstart").exists() and named_clusters_up(lab.run_dir) == ["lab"]
    of_cluster = lab.cluster.paths.settings.read_bytes()
    a, b = lab.of(_A, seed=5), lab.of(_B, seed=6)
    info = a.admit()
    pid = lab.pid(a.node)
    assert info.job == _A and b.admit().job == _B and a.admit() == info and lab.pid(a.node) == pid
    assert lab.served() == {_A, _B}
    assert cluster_settings.stored(JobPaths.of(b.cfg).submitted_settings)["seed"] == 6
    assert lab.cluster.paths.settings.read_bytes() == of_cluster
    assert lab.cluster.up().coordinators == info.coordinators and lab.pid(a.node) == pid
    code, said = _run(capsys, "train", "--with-cluster", f"--job={_A}", *lab.at)
    assert code == Exit.USAGE and "without --with-cluster" in said


def test_job_that_cannot_be_admitted_leaves_nothing_behind(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.of(_A).admit()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        other = lab.of(_B, dcs={"arena_bytes": 32 << 20, "port": taken.getsockname()[1]})
        with pytest.raises(PreflightFailed, match="dcs.port"):
            other.admit()
    assert lab.cluster.jobs == [_A] and lab.served() == {_A}
    paths = JobPaths.of(other.cfg)
    assert not paths.submitted_settings.exists() and not paths.cluster_name.exists()
    other = lab.of(_B)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(other, "put_job_record", interrupted)
        other.admit()
    assert lab.cluster.jobs == [_A] and not other.segments()
    assert not paths.submitted_settings.exists() and not paths.cluster_name.exists()
    paths.steps.write_text("of an earlier job")
    lab.of(_B).admit()
    assert not paths.steps.exists() and len(list(paths.folder.glob("steps.*.jsonl"))) == 1
    with lab.etcd() as etcd:
        etcd.put(Keys(_B).epoch(), b"{}")
        etcd.put(Keys(_B).stream_head("policy"), b"{}")
    with pytest.raises(ConfigError, match="were in memory only"):
        other._begin_or_continue(other.connect().etcd_endpoints)


def test_job_stays_on_its_cluster(lab: Lab, tmp_path: Path) -> None:
    lab.of(_A).admit()
    location = {"job": _A, "run_dir": str(lab.run_dir)}
    assert cluster_settings.location(location).cluster == "lab"
    with pytest.raises(ConfigError, match=f"job {_A} is on cluster lab"):
        Cluster(config.parse(location)).up()
    (JobPaths(lab.run_dir / _B).private / "etcd").mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"job {_B} has a cluster of its own"):
        lab.of(_B).admit()
    assert lab.cluster.jobs == [_A]


def test_purged_job_is_gone_and_the_others_stay(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    for job in (_A, _B):
        lab.of(job).admit()
        with lab.etcd() as etcd:
            etcd.put(f"{Keys(job).root}mine", b"kept")
    code, said = _run(capsys, "down", "--purge", "--yes", "--cluster=lab", *lab.at)
    assert code == Exit.USAGE and "no job is named" in said
    code, said = _run(capsys, "down", "--purge", "--yes", f"--job={_A}", *lab.at)
    assert code == 0 and f"dcs-{_A}" in said
    with lab.etcd() as etcd:
        assert not etcd.range(Keys(_A).root)[0] and etcd.get(ClusterKeys("lab").job(_A)) is None
        assert etcd.get(f"{Keys(_B).root}mine") is not None
    assert not JobPaths.of(lab.of(_A).cfg).cluster_name.exists() and lab.cluster.jobs == [_B]
    lab.of(_A).admit()
    assert lab.served() == {_A, _B}


def test_jobs_are_kept_while_the_cluster_is_down_and_after_a_loss_of_power(lab: Lab) -> None:
    lab.of(_A).admit()
    with lab.etcd() as etcd:
        etcd.put(f"{Keys(_A).root}mine", b"kept")
    lab.cluster.down()
    with pytest.raises(EtcdUnavailable, match="cluster 'lab' is not up"):
        lab.of(_A).admit()
    with pytest.raises(EtcdUnavailable, match="cluster 'lab' is not up"):
        lab.of(_A).remove_job()
    assert JobPaths.of(lab.of(_A).cfg).cluster_name.exists()
    lab.cluster.up()
    assert lab.cluster.jobs == []
    lab.of(_A).admit()
    with lab.etcd() as etcd:
        assert etcd.get(f"{Keys(_A).root}mine") is not None

    def gone() -> bool:
        for files in (lab.cluster.agents, lab.cluster.services, lab.cluster.singletons):
            for record in files.running():
                if record.pid:  # else it is just being started
                    with contextlib.suppress(psutil.NoSuchProcess):
                        psutil.Process(record.pid).kill()
        return not lab.cluster.agents.running() and not lab.cluster.services.running()

    wait_until(gone, what="the end of everything")
    lab.cluster.up()
    wait_until(lambda: lab.pid(lab.of(_A).node), what="the DCS node that the host agent starts")
