"""A leader that assigns work to hosts, by real etcd: passes with their conditions, and a host that is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from support.host_agents import KEYS, Hosts, times
from support.waiting import wait_until

from elastic_rl.coordinator import cluster_reconciler
from elastic_rl.coordinator.cluster_pass import ClusterLimits, ClusterReading, ClusterWrite, cluster_pass
from elastic_rl.coordinator.cluster_reconciler import ClusterReconciler
from elastic_rl.coordinator.election.election import Election
from elastic_rl.errors import Fenced
from elastic_rl.etcd.client import EtcdClient, KeyValue
from elastic_rl.etcd.cluster_records import (
    Assignment,
    Host,
    HostPhase,
    HostSpec,
    HostState,
    HostStatus,
    JobPhase,
    JobRecord,
    JobState,
    RunStatus,
    driver_of,
)
from elastic_rl.etcd.record import Record
from elastic_rl.etcd.transaction import Op

TTL_S = 5.0
DRIVER = driver_of("j")
R = TypeVar("R", bound=Record)


@pytest.fixture
def election(own_etcd: EtcdClient) -> Iterator[Election]:
    election = Election(own_etcd, KEYS, "r0", "", 10).start()
    wait_until(lambda: election.is_leader, what="the leadership")
    yield election
    election.stop()


@pytest.fixture
def reconciler(own_etcd: EtcdClient, election: Election) -> Iterator[ClusterReconciler]:
    """Not started: a test may call ``reconcile_once``."""
    out = ClusterReconciler(own_etcd, KEYS, election, ClusterLimits(times(TTL_S)))
    yield out
    out.stop()


def read(etcd: EtcdClient, key: str, kind: type[R]) -> R | None:
    kv = etcd.get(key)
    return kind.decode(kv.value) if kv is not None else None


def phase(etcd: EtcdClient, name: str) -> HostPhase | None:
    state = read(etcd, KEYS.host_state(name), HostState)
    return state.phase if state is not None else None


def register(etcd: EtcdClient, name: str) -> None:
    """A host that is ready, without an agent."""
    record = Host(id=name, incarnation=f"{name}-1").encode()
    revision = etcd.txn([], [Op.put(KEYS.host(name), record), Op.put(KEYS.host_registration(name), record)]).revision
    etcd.put(KEYS.host_status(name), HostStatus(registration=revision, observed_revision=revision).encode())


def settle(reconciler: ClusterReconciler) -> None:
    wait_until(lambda: reconciler.reconcile_once() == 0, what="a pass that has nothing to write")


def in_the_middle(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Has something happen once in the next pass, between its decision and its writes."""
    def decide(reading: ClusterReading, limits: ClusterLimits) -> list[ClusterWrite]:
        writes = cluster_pass(reading, limits)
        monkeypatch.undo()
        happens()
        return writes
    monkeypatch.setattr(cluster_reconciler, "cluster_pass", decide)


def test_pass_assigns_what_the_cluster_runs_and_rests_then(own_etcd: EtcdClient, reconciler: ClusterReconciler) -> None:
    register(own_etcd, "h1")
    own_etcd.put(KEYS.job("j"), JobRecord(submission=1).encode())
    own_etcd.put(KEYS.job("never-submitted"), JobRecord().encode())
    settle(reconciler)
    held = read(own_etcd, KEYS.assignment(DRIVER), Assignment)
    assert held is not None and (held.host, held.incarnation) == ("h1", "h1-1")
    assert held.arguments == {"job": "j", "submission": 1}
    assert len(own_etcd.range(KEYS.job_states_prefix())[0]) == 1
    state = read(own_etcd, KEYS.job_state("j"), JobState)
    assert state is not None and state.phase is JobPhase.STARTING
    before = own_etcd.range(KEYS.root)[0]
    assert reconciler.reconcile_once() == 0
    assert [kv for kv in own_etcd.range(KEYS.root)[0] if kv.key != KEYS.leader_clock()] == [
        kv for kv in before if kv.key != KEYS.leader_clock()]


def test_queue_of_many_jobs_is_settled_in_a_few_passes(own_etcd: EtcdClient, reconciler: ClusterReconciler) -> None:
    register(own_etcd, "h1")
    for i in range(40):
        own_etcd.put(KEYS.job(f"j{i}"), JobRecord(submission=1, priority=i == 39).encode())
    passes = 0
    while reconciler.reconcile_once():
        passes += 1
    assert passes <= 5
    states = {kv.key: JobState.decode(kv.value) for kv in own_etcd.range(KEYS.job_states_prefix())[0]}
    assert [key for key, s in states.items() if s.phase is JobPhase.STARTING] == [KEYS.job_state("j39")]


def test_write_is_refused_when_what_it_was_decided_by_has_changed(
        own_etcd: EtcdClient, reconciler: ClusterReconciler, monkeypatch: pytest.MonkeyPatch) -> None:
    register(own_etcd, "h1")
    while phase(own_etcd, "h1") is not HostPhase.READY:
        assert reconciler.reconcile_once() == 1
    own_etcd.put(KEYS.job("j"), JobRecord(submission=1).encode())
    own_etcd.put(KEYS.job_state("j"), JobState(
        phase=JobPhase.STARTING, submission=1, order=1, reason="waits for its driver to run").encode())
    cordoned = HostSpec(cordoned=True).encode()
    in_the_middle(monkeypatch, lambda: own_etcd.put(KEYS.host_spec("h1"), cordoned))
    reconciler.reconcile_once()
    assert own_etcd.get(KEYS.assignment(DRIVER)) is None
    settle(reconciler)
    assert phase(own_etcd, "h1") is HostPhase.CORDONED and own_etcd.get(KEYS.assignment(DRIVER)) is None


def test_pass_of_a_leader_that_is_none_any_more_writes_nothing(
        own_etcd: EtcdClient, election: Election, reconciler: ClusterReconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    reconciler.reconcile_once()
    register(own_etcd, "h1")

    def another_leads() -> None:
        key = KEYS.leader("r0")
        mine = own_etcd.get(key)
        assert mine is not None
        own_etcd.delete(key)
        own_etcd.put(key, mine.value)

    in_the_middle(monkeypatch, another_leads)
    with pytest.raises(Fenced):
        reconciler.reconcile_once()
    assert phase(own_etcd, "h1") is None


def test_cluster_is_read_at_one_revision(
        own_etcd: EtcdClient, reconciler: ClusterReconciler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registration that arrives while it is read belongs to the next pass with all of its keys."""
    read_range, readings = own_etcd.range, list[ClusterReading]()

    def slow(prefix: str, *, revision: int = 0) -> tuple[list[KeyValue], int]:
        found = read_range(prefix, revision=revision)
        if prefix == KEYS.hosts_prefix():
            register(own_etcd, "h1")
        return found

    monkeypatch.setattr(own_etcd, "range", slow)
    monkeypatch.setattr(cluster_reconciler, "cluster_pass", lambda reading, _: readings.append(reading) or [])
    reconciler.reconcile_once()
    assert not readings[0].hosts and not readings[0].host_registrations and not readings[0].host_statuses


def test_unreadable_record_is_reported_and_stops_nothing(own_etcd: EtcdClient, reconciler: ClusterReconciler) -> None:
    register(own_etcd, "h1")
    own_etcd.put(KEYS.job("broken"), b"{")
    settle(reconciler)
    assert phase(own_etcd, "h1") is HostPhase.READY
    assert list(reconciler.unreadable) == [KEYS.job("broken")]


def test_leader_clock_counts_on_after_a_change_of_leaders(own_etcd: EtcdClient, election: Election) -> None:
    """A host's time as SUSPECTED is not counted by the clocks of two processes."""
    now = [1000.0]
    first = ClusterReconciler(own_etcd, KEYS, election, monotonic=lambda: now[0])
    first.reconcile_once()
    now[0] += 500.0
    first.reconcile_once()
    later = ClusterReconciler(own_etcd, KEYS, election, monotonic=lambda: 3.0)
    register(own_etcd, "h1")
    later.reconcile_once()
    state = read(own_etcd, KEYS.host_state("h1"), HostState)
    assert state is not None and state.since_s == 500.0


def test_job_goes_on_on_another_host_when_its_host_is_lost(
        own_etcd: EtcdClient, reconciler: ClusterReconciler, host: Hosts) -> None:
    hosts = {name: host(name, ttl_s=TTL_S) for name in ("h1", "h2")}
    reconciler.start()
    hosts["h1"].start_process()
    wait_until(lambda: phase(own_etcd, "h1") is HostPhase.READY, what="the first host")
    own_etcd.put(KEYS.job("j"), JobRecord(submission=1).encode())
    own_etcd.put(KEYS.run_status("j"), RunStatus(submission=1, phase=JobPhase.RUNNING).encode())

    def job_runs() -> bool:
        state = read(own_etcd, KEYS.job_state("j"), JobState)
        return state is not None and state.phase is JobPhase.RUNNING and not state.reason

    def holder() -> str:
        held = read(own_etcd, KEYS.assignment(DRIVER), Assignment)
        return held.host if held is not None else ""

    before = hosts["h1"].await_service(DRIVER)
    wait_until(job_runs, what="the job to run")
    assert holder() == "h1"
    hosts["h2"].start_process()
    wait_until(lambda: phase(own_etcd, "h2") is HostPhase.READY, what="the second host")
    hosts["h1"].power_off()
    wait_until(lambda: phase(own_etcd, "h1") is HostPhase.LOST, what="the loss of the first host")
    wait_until(lambda: holder() == "h2", what="the move")
    assert hosts["h2"].await_service(DRIVER).generation > before.generation
    wait_until(job_runs, what="the job to run again")
    hosts["h1"].start_process()
    wait_until(lambda: phase(own_etcd, "h1") is HostPhase.READY, what="the return of the first host")
    assert holder() == "h2" and not hosts["h1"].files.running()
