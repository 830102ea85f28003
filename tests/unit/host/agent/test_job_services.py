"""Of which Rays this host has a worker, how long one that is to be emptied keeps it, and when one is started again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_rl.etcd.cluster_records import HostPhase, HostState, JobPhase, JobState, RayHead
from elastic_rl.host.agent import job_services
from elastic_rl.host.agent.job_services import JobServices

DRAIN = 7.0
HEADS = {"own": RayHead(host="here", address="a:1", epoch=1), "other": RayHead(host="b", address="b:1", epoch=1),
         "gone": RayHead(host="b", address="b:1", epoch=1, left={"here": DRAIN})}


def states(phase: JobPhase = JobPhase.RUNNING) -> dict[str, tuple[JobState, int]]:
    return {job: (JobState(phase=phase, submission=1, order=1), 1) for job in HEADS}


def here(phase: HostPhase, drain_at: float = 0.0, *, overdue: bool = False) -> HostState:
    return HostState(phase=phase, incarnation="i", since_s=0.0, drain_at=drain_at, drain_overdue=overdue)


class Host:
    """A host as far as it runs workers of Ray. ``joined``: jobs of whose Ray it has one; ``runs``: jobs that run here.
    """

    def __init__(self, *, joined: tuple[str, ...] = ("other", "gone"), runs: tuple[str, ...] = ()) -> None:
        self.left: list[str] = []
        self.restarted: list[str] = []
        self.in_etcd: set[str] = set()
        """Keys that etcd has."""
        self.worker = SimpleNamespace(pid=1, alive=lambda: True, is_complete=lambda: True, missing=set)
        services = SimpleNamespace(
            get=lambda name: name.removeprefix("ray-worker-") in joined or None,
            names=lambda: [f"ray-worker-{job}" for job in joined])
        cluster: Any = SimpleNamespace(
            cfg=SimpleNamespace(cluster_name="lab"), host=SimpleNamespace(name="here"), services=services,
            of_job=lambda job: SimpleNamespace(run=SimpleNamespace(pid=int(job in runs))),
            join_ray=lambda job, head: self.worker, leave_ray=self.left.append, restart_ray=self.restarted.append)
        etcd: Any = SimpleNamespace(get=lambda key: key if key.rpartition("lab/")[2] in self.in_etcd else None)
        self.services = JobServices(lambda: cluster, etcd, lambda: True)

    def wanted(self, state: HostState | None, jobs: JobPhase = JobPhase.RUNNING) -> set[str]:
        return set(self.services._wanted(states(jobs), HEADS, state))


def test_host_joins_the_ray_of_every_live_job_that_runs_elsewhere() -> None:
    host = Host(joined=())
    assert host.wanted(here(HostPhase.READY)) == {"other", "gone"}
    for over in (JobPhase.FINISHED, JobPhase.FAILED, JobPhase.STOPPED, JobPhase.QUEUED):
        assert not host.wanted(here(HostPhase.READY), over)
    assert Host(runs=("other",)).wanted(here(HostPhase.READY)) == {"gone"}, "its driver has not said yet where it is"


@pytest.mark.parametrize("phase", [None, HostPhase.JOINING, HostPhase.CORDONED, HostPhase.SUSPECTED, HostPhase.LOST])
def test_host_that_is_not_ready_keeps_the_workers_that_it_has_and_starts_none(phase: HostPhase | None) -> None:
    state = here(phase) if phase else None
    assert not Host(joined=()).wanted(state), "nothing more, and what an older generation has left may be ending"
    assert Host().wanted(state) == {"other", "gone"}


@pytest.mark.parametrize("phase", [HostPhase.DRAINING, HostPhase.SUSPECTED])
def test_host_that_is_drained_keeps_what_has_not_left_for_the_time_of_the_drain(
        phase: HostPhase, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Host().wanted(here(phase, DRAIN)) == {"other"}
    assert Host().wanted(here(phase, DRAIN + 1)) == {"other", "gone"}, "it had left in an earlier drain"
    now, host, over = 1000.0, Host(), here(phase, DRAIN, overdue=True)
    monkeypatch.setattr(job_services.time, "monotonic", lambda: now)
    for seconds, keeps in ((0.0, {"other"}), (9.0, {"other"}), (1.0, set[str]())):
        now += seconds
        assert host.wanted(over) == keeps, "engines hand their requests over when the time is over"
    assert not Host().wanted(here(HostPhase.LEFT, DRAIN))
    assert not Host(joined=()).wanted(here(HostPhase.DRAINING, DRAIN))


def test_worker_ends_with_its_job_and_not_because_a_record_cannot_be_read() -> None:
    host = Host()
    host.services._join({}, states(), HEADS)
    assert sorted(host.left) == ["gone", "other"]

    host = Host()
    host.in_etcd = {"ray_heads/other", "jobs/other", "ray_heads/gone", "jobs/gone"}
    newer = {job: (state.replace(phase=JobPhase("frozen")), 1) for job, (state, _) in states().items()}
    host.services._join({}, {}, HEADS)
    host.services._join({}, states(), {})
    host.services._join({}, newer, HEADS)
    assert not host.left
    host.in_etcd = {"ray_heads/other", "jobs/gone"}
    host.services._join({}, {}, HEADS)
    assert sorted(host.left) == ["gone", "other"], "the job, and the head, are gone"


def test_worker_that_lacks_something_for_long_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    host, now = Host(), 1000.0
    monkeypatch.setattr(job_services.time, "monotonic", lambda: now)

    def look(seconds: float) -> list[str]:
        nonlocal now
        now += seconds
        host.services._join({"other": HEADS["other"]}, states(), HEADS)
        return host.restarted

    host.worker.missing = lambda: {"raylet"}
    assert not look(0) and not look(9)
    host.worker.missing = set
    assert not look(0)
    host.worker.missing = lambda: {"raylet"}
    assert not look(1) and look(10) == ["other"]
    host.restarted.clear()
    host.worker.is_complete = lambda: False
    assert not look(0) and not look(170)
    host.worker.pid = 2  # another process of it has just begun
    assert not look(20) and not look(170) and look(10) == ["other"]
