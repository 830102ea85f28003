"""The cluster's leader and host agents in a world that fails (``support/cluster_world.py``), and the same with a guard
taken away, which the world must find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.budget import seeds
from support.cluster_world import ClusterWorld, Violation

from elastic_rl.coordinator import cluster_pass
from elastic_rl.coordinator.assignments import state_machine as assignments
from elastic_rl.coordinator.cluster_pass import ClusterWrite
from elastic_rl.coordinator.hosts import state_machine as hosts
from elastic_rl.etcd.cluster_records import Assignment, HostPhase
from elastic_rl.etcd.transaction import Op
from elastic_rl.host.agent import duties
from elastic_rl.host.agent.duties import AgentLease

SEEDS, BATCHES = seeds(20), 2
MUTANT_SEEDS = 60


def _world(seed: int) -> ClusterWorld:
    return ClusterWorld(seed, parallel=4 if seed % 5 == 4 else 3)


@pytest.mark.timeout(600 + SEEDS)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_assignments_have_one_effective_holder_and_are_carried_out_whatever_fails(batch: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(batch, SEEDS, BATCHES):
        try:
            seen += _world(seed).run().counts
        except Violation as e:
            raise AssertionError(f"seed {seed}: {e}") from e
    worlds = SEEDS // BATCHES
    assert min(seen["starts"], seen["refused"], seen["leases lost"], seen["host suspected"]) > worlds, seen
    assert min(seen["moves"], seen["adopted"], seen["host lost"]) > worlds / 2, seen
    assert min(seen["self-fenced"], seen["fenced"], seen["over"], seen["taken back"]) > 0, "too few faults happened"


def test_seed_reproduces_the_same_history() -> None:
    assert _world(7).run().counts == _world(7).run().counts


# -- guards taken away -------------------------------------------------------------------------------------------------
def _no_self_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    why_over = duties._why_over
    monkeypatch.setattr(duties, "_why_over", lambda service, now, lease, known, times: why_over(
        service, now, AgentLease(now), known, times))


def _self_fence_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    why_over = duties._why_over
    monkeypatch.setattr(duties, "_why_over", lambda service, now, lease, known, times: why_over(
        service, now, AgentLease(lease.renewed_at + times.lease_ttl_s + times.lost_s), known, times))


def _leader_ignores_incarnations(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = assignments.decide

    def of_any_boot(wanted: Any, now: Assignment, generation: int, known: Any, *more: Any) -> Any:
        return decide(wanted, now, generation, {name: host if name != now.host else replace(
            host, state=host.state.replace(incarnation=now.incarnation)) for name, host in known.items()}, *more)

    monkeypatch.setattr(assignments, "decide", of_any_boot)


def _agent_ignores_incarnations(monkeypatch: pytest.MonkeyPatch) -> None:
    why_not = duties._why_not
    monkeypatch.setattr(duties, "_why_not", lambda name, order, incarnation, *more: why_not(
        name, order, order.assignment.incarnation, *more))


def _released_assignments_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    put = ClusterWrite.op
    monkeypatch.setattr(ClusterWrite, "op", property(lambda self: (
        Op.delete(self.key) if isinstance(self.record, Assignment) and not self.record.host
        else put.fget(self))))  # type: ignore[attr-defined]


def _start_without_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AgentLease, "allows_start", lambda self, now, times: self.granted_at is not None or now > 0)
    why_not = duties._why_not
    monkeypatch.setattr(duties, "_why_not", lambda name, order, incarnation, now, lease, known, *more: why_not(
        name, order, incarnation, now, AgentLease(now, float("-inf")), known, *more))


def _start_of_an_older_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duties.KnownOrders, "updated", lambda self, read_at, revision, orders: duties.KnownOrders(
        read_at, revision, orders))


def _leader_writes_without_its_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClusterWorld, "_guard", lambda self, replica: [])


def _adoption_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = duties.duties

    def of_any_generation(host: str, incarnation: str, now: float, lease: Any, known: Any, here: Any,
                          *more: Any) -> Any:
        def generation(service: Any) -> int:
            order = known.orders.get(service.name)
            return order.generation if order is not None else service.generation

        return decide(host, incarnation, now, lease, known, [
            replace(s, generation=generation(s)) if s.alive else s for s in here], *more)

    monkeypatch.setattr(duties, "duties", of_any_generation)


def _restarted_agent_ends_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    why_over = duties._why_over
    monkeypatch.setattr(duties, "_why_over", lambda service, *more: (
        why_over(service, *more) if service.adopted else "started by another agent"))


def _singletons_move_to_idle_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = assignments.decide

    def balanced(wanted: Any, now: Assignment, generation: int, known: Any, *more: Any) -> Any:
        decision, best = decide(wanted, now, generation, known, *more), assignments._best(known, "", ())
        if decision.assignment is None and now.host and best not in (None, now.host):
            return assignments._move(wanted, now, {best: known[best]}, [], "it has less to do", 0.0)
        return decision

    monkeypatch.setattr(assignments, "decide", balanced)


def _hosts_of_a_stale_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_pass, "_host_unchanged", lambda reading, name: ())


def _jobs_of_a_stale_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    job_writes = cluster_pass._job_writes
    monkeypatch.setattr(cluster_pass, "_job_writes", lambda *given: [
        replace(write, compares=()) for write in job_writes(*given)])


def _lost_hosts_that_return_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = hosts.advance

    def without_joining(before: Any, seen: Any, *more: Any) -> Any:
        after = advance(before, seen, *more)
        joins = before is not None and before.phase is HostPhase.LOST and after.phase is HostPhase.JOINING
        return after.replace(phase=HostPhase.READY) if joins else after

    monkeypatch.setattr(hosts, "advance", without_joining)


def _suspected_hosts_are_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = hosts.advance
    monkeypatch.setattr(hosts, "advance", lambda before, seen, leader_s, times: advance(
        before, seen, leader_s, SimpleNamespace(lost_s=0.0)))  # type: ignore[arg-type]


MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    _no_self_fence: 1, _self_fence_too_late: 1, _leader_ignores_incarnations: 0, _agent_ignores_incarnations: 0,
    _released_assignments_are_deleted: 0, _start_without_a_lease: 1, _start_of_an_older_generation: 4,
    _leader_writes_without_its_guard: 9, _adoption_by_name: 1, _restarted_agent_ends_what_runs: 1,
    _singletons_move_to_idle_hosts: 0, _hosts_of_a_stale_reading: 10, _jobs_of_a_stale_reading: 1,
    _lost_hosts_that_return_are_ready: 0, _suspected_hosts_are_lost_at_once: 10,
}
"""What takes a guard away, and a seed that finds it."""


@pytest.mark.parametrize(("mutate", "first"), MUTANTS.items(), ids=[m.__name__.strip("_") for m in MUTANTS])
def test_world_finds_what_goes_wrong_without_a_guard(mutate: Callable[[pytest.MonkeyPatch], None], first: int,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(Violation):
        for seed in (first, *range(MUTANT_SEEDS)):  # the others where the world has changed
            _world(seed).run()
