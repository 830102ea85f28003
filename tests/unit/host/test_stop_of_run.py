"""What the process of a run and its actor make of a stop: etcd and the cluster are stubs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import wait_until

from elastic_rl import config, run_service
from elastic_rl.driver.supervisor import STOPPED
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.cluster_records import JobPhase, JobRecord, RunStatus
from elastic_rl.etcd.records import JobStatus
from elastic_rl.host.job_run import RunReading
from elastic_rl.roles import actor
from elastic_rl.roles.actor import ActorRole
from elastic_rl.run_service import RunService


class Etcd:
    """Has one record. ``away``: so many reads fail first."""

    def __init__(self, value: bytes | None = None, away: int = 0) -> None:
        self.value, self.away, self.reads = value, away, 0

    def get(self, key: str) -> Any:
        self.reads += 1
        if self.reads <= self.away:
            raise EtcdUnavailable("away")
        return None if self.value is None else SimpleNamespace(key=key, value=self.value, mod_revision=1)


class Run:
    """The run of a job whose record it holds."""

    def __init__(self) -> None:
        self.record, self.away, self.log = JobRecord(submission=1), 0, Path("train.log")

    def read_from(self, etcd: Any) -> RunReading:
        return RunReading(None, self.record)

    def withdraw(self, etcd: Any) -> bool:
        if self.away:
            self.away -= 1
            raise EtcdUnavailable("away")
        self.record = self.record.replace(stopped=True)
        return True

    def save(self, *_: Any) -> None: ...


class Cluster:
    def __init__(self) -> None:
        self.run, self.stops_runs, self.taken_down = Run(), False, False
        self.cfg = config.parse({"job": "j"})

    @contextlib.contextmanager
    def etcd(self, info: Any, **_: Any) -> Iterator[Etcd]:
        yield Etcd()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(run_service, "_READ_EVERY_S", 0.01)
    monkeypatch.setattr(actor, "_STOP_READ_S", 0.01)
    return Cluster()


def service(cluster: Any) -> RunService:
    return RunService(cluster, 1, 1)


def test_run_whose_cluster_is_taken_down_writes_its_stop_itself_once_etcd_answers(cluster: Cluster) -> None:
    """The command that takes it down may have had no answer; the actor reads the record alone."""
    run, cluster.run.away = service(cluster), 3
    with run._following(None):  # type: ignore[arg-type]
        cluster.stops_runs = True
        wait_until(lambda: run._withdrawn.is_set(), what="the stop")
    assert cluster.run.record.stopped


def test_run_whose_cluster_is_taken_down_stops_no_later_submission(cluster: Cluster) -> None:
    run, cluster.stops_runs, cluster.run.record = service(cluster), True, JobRecord(submission=2)
    with run._following(None):  # type: ignore[arg-type]
        wait_until(lambda: run._withdrawn.is_set(), what="the stop")
    assert not cluster.run.record.stopped


def test_signal_does_not_interrupt_a_stop_and_is_none_before_it(cluster: Cluster) -> None:
    run = service(cluster)
    run._withdrawn.set()
    run._interrupt()
    run._withdrawn.clear()
    with pytest.raises(KeyboardInterrupt):
        run._interrupt()


@pytest.mark.parametrize("phase", [JobPhase.QUEUED, JobPhase.STARTING, JobPhase.RUNNING])
def test_process_that_is_started_again_during_a_stop_goes_on_with_it_where_the_run_had_begun(
        cluster: Cluster, monkeypatch: pytest.MonkeyPatch, phase: JobPhase) -> None:
    run, trained = service(cluster), list[bool]()
    run._withdrawn.set()

    def train(*_: Any) -> int:
        trained.append(True)
        return STOPPED

    monkeypatch.setattr(run, "_train", train)
    etcd: Any = Etcd(JobStatus(phase="stopped", step=4, message="stopped by its operator at step 4").encode())
    status = run._carry_out(etcd, None, None, RunStatus(submission=1, phase=phase))  # type: ignore[arg-type]
    assert status.phase is JobPhase.STOPPED and bool(trained) == (phase is JobPhase.RUNNING)
    assert status.message == ("stopped by its operator at step 4" if trained else "stopped by its operator")


def test_signal_before_a_stop_leaves_what_runs_to_the_next_process_which_carries_the_stop_out(
        cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    run, goes_on = service(cluster), list[bool]()

    def train(submission: Any, info: Any, begun_at: float, begin: Any, asked: Any) -> int:
        try:
            run._interrupt()
        except KeyboardInterrupt:
            run._withdrawn.set()
            goes_on.append(asked())
            raise
        return 0

    monkeypatch.setattr(run, "_train", train)
    with pytest.raises(KeyboardInterrupt):
        run._carry_out(Etcd(), None, None, RunStatus(submission=1, phase=JobPhase.RUNNING))  # type: ignore[arg-type]
    assert goes_on == [True]


@pytest.mark.parametrize(("etcd", "said"), [
    (Etcd(JobStatus(phase="stopped", message="at 7").encode()), "at 7"),
    (Etcd(JobStatus(phase="rl", step=7).encode()), "could not be committed"),
    (Etcd(away=1), "etcd did not answer")])
def test_operator_is_told_what_is_known_of_the_commit(cluster: Cluster, etcd: Any, said: str) -> None:
    assert said in service(cluster)._said_of_stop(etcd)


@pytest.mark.parametrize(("value", "stops"), [
    (JobRecord(submission=1).encode(), False), (JobRecord(submission=1, stopped=True).encode(), True),
    (JobRecord(submission=2).encode(), True), (None, True), (b"{", False)])
def test_actor_ends_for_a_stop_a_later_submission_and_a_job_that_is_gone(
        cluster: Cluster, value: bytes | None, stops: bool) -> None:
    """Not for an outage, nor for a record that it cannot read."""
    role: Any = SimpleNamespace(ctx=SimpleNamespace(config=cluster.cfg, job="j", submission=1),
                                etcd=Etcd(value, away=2), _stopping=threading.Event(), _stop_asked=threading.Event())
    thread = threading.Thread(target=ActorRole._follow_job, args=(role,), daemon=True)
    thread.start()
    wait_until(lambda: role._stop_asked.is_set() or role.etcd.reads >= 6, what="reads of the record")
    role._stopping.set()
    thread.join(60)
    assert role._stop_asked.is_set() is stops
