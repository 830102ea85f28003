"""The state machines of the cluster's leader: hosts, assignments, jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.assignments import state_machine as assignments
from elastic_rl.coordinator.assignments.state_machine import AssignableHost, AssignmentLimits, Singleton
from elastic_rl.coordinator.cluster_pass import ClusterLimits, ClusterReading, Stored, cluster_pass
from elastic_rl.coordinator.hosts import state_machine as hosts
from elastic_rl.coordinator.hosts.state_machine import SeenHost
from elastic_rl.coordinator.hosts.times import HostTimes
from elastic_rl.coordinator.jobs import state_machine as jobs
from elastic_rl.coordinator.jobs.state_machine import Driver, SeenJob
from elastic_rl.etcd.cluster_records import (
    Assignment,
    ClusterSpec,
    Drain,
    FailedHost,
    Host,
    HostPhase,
    HostSpec,
    HostState,
    HostStatus,
    JobPhase,
    JobRecord,
    JobState,
    RunState,
    RunStatus,
    ServiceStatus,
    driver_of,
    is_stopped,
)
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.transaction import Compare, KeyValue

TIMES, LIMITS = HostTimes(), AssignmentLimits()
READY = HostStatus(registration=1)
DRAIN = HostSpec(drain=Drain(within_s=60.0))


def seen(incarnation: str | None = "1", status: HostStatus | None = READY, spec: HostSpec = HostSpec(),
         holds: bool = True) -> SeenHost:
    return SeenHost(None if incarnation is None else Host(id="a", incarnation=incarnation), status, spec, holds)


def after(*looks: tuple[float, SeenHost]) -> HostState | None:
    state = None
    for at, look in looks:
        state = hosts.advance(state, look, at, TIMES)
    return state


# -- hosts -------------------------------------------------------------------------------------------------------------
def test_host_is_ready_once_its_agent_says_so() -> None:
    joining = after((0.0, seen()), (1.0, seen(status=None)))
    assert joining is not None and joining.phase is HostPhase.JOINING
    ready = hosts.advance(joining, seen(), 2.0, TIMES)
    assert ready is not None and ready.phase is HostPhase.READY and hosts.is_fit(ready, seen())
    assert not hosts.is_fit(ready, seen(spec=HostSpec(cordoned=True))) and not hosts.is_fit(ready, seen(status=None))


def test_silent_host_is_suspected_then_lost_and_joins_again() -> None:
    looks = [(0.0, seen()), (1.0, seen()), (10.0, seen(None)), (10.0 + TIMES.lost_s - 0.1, seen(None))]
    suspected = after(*looks)
    assert suspected is not None and suspected.phase is HostPhase.SUSPECTED
    back = hosts.advance(suspected, seen(), 12.0, TIMES)
    assert back is not None and back.phase is HostPhase.READY, "nothing has happened"
    lost = hosts.advance(suspected, seen(None), 10.0 + TIMES.lost_s, TIMES)
    assert lost is not None and lost.phase is HostPhase.LOST
    returned = hosts.advance(lost, seen(), 99.0, TIMES)
    assert returned is not None and returned.phase is HostPhase.JOINING


def test_host_that_came_back_while_nobody_led_has_its_time_from_the_end_of_that_lease() -> None:
    """Its agent may have started a driver then, and ends it within that time."""
    suspected = after((0.0, seen()), (1.0, seen()), (10.0, seen(None)))
    assert suspected is not None
    again = hosts.advance(suspected, replace(seen(None), registered_again=True), 10.0 + TIMES.lost_s, TIMES)
    assert again is not None and (again.phase, again.since_s) == (HostPhase.SUSPECTED, 10.0 + TIMES.lost_s)
    lost = suspected.replace(phase=HostPhase.LOST)
    again = hosts.advance(lost, replace(seen(None), registered_again=True), 99.0, TIMES)
    assert again is not None and (again.phase, again.since_s) == (HostPhase.SUSPECTED, 99.0)
    assert hosts.advance(lost, seen(None), 99.0, TIMES) == lost

    def registered_again(registered_at: int, written_at: int) -> bool:
        return ClusterReading(
            9, 0.0, host_registrations={"a": _stored(Host(id="a", incarnation="1"), registered_at)},
            host_states={"a": _stored(suspected, written_at)}).seen_hosts["a"].registered_again

    assert registered_again(6, 5) and not registered_again(5, 6)


def test_drained_host_leaves_when_it_holds_nothing_and_joins_when_the_drain_is_withdrawn() -> None:
    draining = after((0.0, seen()), (1.0, seen(spec=DRAIN)))
    assert draining is not None and draining.phase is HostPhase.DRAINING and draining.drain_deadline_s == 61.0
    late = [hosts.advance(draining, seen(spec=DRAIN), at, TIMES) for at in (60.9, 61.0)]
    assert [state is not None and state.drain_overdue for state in late] == [False, True]
    silent = hosts.advance(draining, seen(spec=DRAIN, holds=False, status=None), 2.0, TIMES)
    assert silent is not None and silent.phase is HostPhase.DRAINING, "its agent has not reported what is left"
    left = hosts.advance(draining, seen(spec=DRAIN, holds=False), 2.0, TIMES)
    assert left is not None and left.phase is HostPhase.LEFT
    assert hosts.advance(left, seen(None, spec=DRAIN), 500.0, TIMES) == left, "it may be switched off"
    joins = hosts.advance(left, seen(), 3.0, TIMES)
    assert joins is not None and joins.phase is HostPhase.JOINING


def test_drain_that_is_asked_for_again_begins_its_time_anew() -> None:
    draining = after((0.0, seen()), (1.0, seen(spec=DRAIN)))
    sooner = HostSpec(drain=Drain(within_s=0.0), by="ann", reason="it burns", at=7.0)
    asked_again = hosts.advance(draining, seen(spec=sooner), 20.0, TIMES)
    assert asked_again is not None and asked_again.drain_deadline_s == 20.0 and asked_again.drain_overdue
    assert asked_again.reason == "drained by ann: it burns"
    assert hosts.advance(asked_again, seen(spec=sooner), 30.0, TIMES) == asked_again
    withdrawn = hosts.advance(asked_again, seen(spec=HostSpec(cordoned=True, by="ann")), 31.0, TIMES)
    assert withdrawn is not None and withdrawn.drain_deadline_s == 0.0 and not withdrawn.drain_overdue


looks = st.builds(lambda look, registered_again: replace(look, registered_again=registered_again), st.builds(
    seen, st.sampled_from([None, "1", "2"]), st.sampled_from([None, READY, READY.replace(not_ready="sweeps")]),
    st.sampled_from([HostSpec(), HostSpec(cordoned=True), DRAIN]), st.booleans()), st.booleans())


@given(st.lists(st.tuples(st.floats(0.0, 20.0), looks), max_size=30))
def test_no_host_becomes_ready_without_evidence_or_lost_without_being_suspected(
        story: list[tuple[float, SeenHost]]) -> None:
    state, now = None, 0.0
    for pause_s, look in story:
        before, now = state, now + pause_s
        state = hosts.advance(before, look, now, TIMES)
        if state is None or before is not None and before.phase is state.phase:
            continue
        if state.phase is HostPhase.LOST:
            assert before is not None and before.phase is HostPhase.SUSPECTED and not look.registered_again
            assert now - before.since_s >= TIMES.lost_s
        if state.phase is HostPhase.READY:
            assert before is not None and before.phase not in (HostPhase.LOST, HostPhase.LEFT)
            assert look.ready or before.phase is HostPhase.CORDONED
        assert hosts.advance(state, look, now, TIMES) in (state, None) or state.phase in (
            HostPhase.JOINING, HostPhase.SUSPECTED), "one reading changes a host once"


# -- assignments -------------------------------------------------------------------------------------------------------
def host(phase: HostPhase = HostPhase.READY, incarnation: str = "1", *, fit: bool | None = None, **more: Any
         ) -> AssignableHost:
    state = HostState(phase=phase, incarnation=incarnation, since_s=0.0, drain_deadline_s=50.0)
    return AssignableHost(state, phase is HostPhase.READY if fit is None else fit, **more)


def decide(now: Assignment, leader_s: float = 0.0, movable: bool = False, home: str = "", **known: AssignableHost
           ) -> assignments.Decision:
    return assignments.decide(Singleton("driver/j", movable=movable, home=home), now, 3, known, leader_s, LIMITS)


HELD = Assignment(host="a", incarnation="1")
CRASHED = ServiceStatus(state=RunState.ENDED, generation=3, restarts=3)


def moved_to(decision: assignments.Decision) -> str:
    return decision.assignment.host if decision.assignment is not None else ""


def test_singleton_goes_to_the_fit_host_that_holds_least() -> None:
    assert moved_to(decide(Assignment(), a=host(assigned=2), b=host(assigned=1), c=host(HostPhase.CORDONED))) == "b"
    assert decide(Assignment(), c=host(HostPhase.JOINING)).waits_for == "no host is READY"


def test_singleton_goes_home_where_that_is_fit_and_did_not_fail_it() -> None:
    assert moved_to(decide(Assignment(), home="b", a=host(), b=host(assigned=2))) == "b"
    assert moved_to(decide(Assignment(), home="b", a=host(assigned=2), b=host(HostPhase.CORDONED))) == "a"
    failed = Assignment(failed=[FailedHost(host="b", at_s=0.0)])
    assert moved_to(decide(failed, home="b", a=host(assigned=2), b=host())) == "a"
    assert decide(HELD, home="b", a=host(), b=host()).assignment is None, "nothing moves back"


@pytest.mark.parametrize("phase", [HostPhase.JOINING, HostPhase.SUSPECTED])
def test_singleton_waits_a_while_for_its_home_that_is_about_to_be_there(phase: HostPhase) -> None:
    waits = decide(Assignment(), home="b", a=host(), b=host(phase))
    assert waits.assignment is None and "waits for host b" in waits.waits_for
    assert moved_to(decide(Assignment(), leader_s=60.0, home="b", a=host(), b=host(phase))) == "a"
    assert moved_to(decide(HELD, home="a", a=host(HostPhase.DRAINING), b=host(), leader_s=60.0)) == "b"
    assert moved_to(decide(Assignment(), home="b", a=host(), b=host(HostPhase.LOST))) == "a"


def test_singleton_of_a_lost_host_moves_only_if_another_host_is_fit() -> None:
    assert moved_to(decide(HELD, a=host(HostPhase.LOST), b=host())) == "b"
    kept = decide(HELD, a=host(HostPhase.LOST), b=host(HostPhase.JOINING))
    assert kept.assignment is None and "no other host is fit" in kept.waits_for
    assert decide(HELD, a=host(HostPhase.LOST, changing=True), b=host()).assignment is None, "it is registered again"


def test_singleton_of_a_host_that_has_booted_is_assigned_again() -> None:
    again = decide(HELD, a=host(incarnation="2")).assignment
    assert again is not None and (again.host, again.incarnation) == ("a", "2")


def test_drain_moves_a_singleton_when_its_holder_agrees_or_at_the_deadline() -> None:
    known = {"a": host(HostPhase.DRAINING), "b": host()}
    assert not moved_to(decide(HELD, 49.0, **known))
    assert moved_to(decide(HELD, 49.0, movable=True, **known)) == moved_to(decide(HELD, 50.0, **known)) == "b"
    assert decide(HELD, 90.0, a=known["a"]).assignment is None, "it stays where it is while nobody else can take it"


def test_singleton_that_keeps_ending_moves_and_each_further_move_waits_longer() -> None:
    first = decide(HELD, 100.0, a=host(service=CRASHED), b=host())
    assert moved_to(first) == "b" and first.assignment is not None
    second = first.assignment
    crashed = {"a": host(), "b": host(service=CRASHED)}
    assert not moved_to(decide(second, 100.0 + LIMITS.move_backoff_initial_s - 1, **crashed))
    back = decide(second, 100.0 + LIMITS.move_backoff_initial_s, **crashed)
    assert moved_to(back) == "a" and moved_to(decide(second, 200.0, c=host(assigned=9), **crashed)) == "c"
    assert not moved_to(decide(HELD, 100.0, a=host(service=CRASHED.replace(generation=2)), b=host()))
    completed = CRASHED.replace(state=RunState.COMPLETED)
    assert moved_to(decide(HELD, 100.0, a=host(service=completed))) == "a", "what it said of its end is lost"
    assert not moved_to(decide(HELD, 100.0, a=host(service=completed.replace(generation=2))))
    assert not moved_to(decide(HELD, 100.0, a=host(service=CRASHED.replace(restarts=2)), b=host()))


phases = st.sampled_from(list(HostPhase))
known_hosts = st.dictionaries(st.sampled_from("abc"), st.builds(
    lambda phase, incarnation, service, assigned: host(phase, incarnation, service=service, assigned=assigned),
    phases, st.sampled_from("12"), st.none() | st.just(CRASHED), st.integers(0, 3)))


@given(known_hosts, st.floats(0.0, 1e4), st.lists(st.floats(0.0, 1e4), max_size=8).map(sorted))
def test_singleton_moves_to_fit_hosts_only_and_never_without_a_reason(
        known: dict[str, AssignableHost], leader_s: float, failures: list[float]) -> None:
    now = HELD.replace(failed=[FailedHost(host="b", at_s=at) for at in failures if at <= leader_s])
    decision = decide(now, leader_s, **known)
    holder = known.get("a")
    well = holder is not None and holder.state.incarnation == "1" and holder.service is None and (
        holder.state.phase not in (HostPhase.LOST, HostPhase.DRAINING))
    if decision.assignment is not None:
        to = known[decision.assignment.host]
        assert to.fit and decision.assignment.incarnation == to.state.incarnation and not well
        assert len(decision.assignment.failed) <= LIMITS.remember
    else:
        assert well or decision.waits_for


# -- jobs --------------------------------------------------------------------------------------------------------------
def job(phase: JobPhase | None = JobPhase.QUEUED, order: int = 1, submission: int = 1, **more: Any) -> SeenJob:
    record = JobRecord(priority=more.pop("priority", 0), stopped=more.pop("stopped", False), submission=submission,
                       stop_s=more.pop("stop_s", 60.0))
    seen_submission = more.pop("seen", submission)
    state = None if phase is None else JobState(phase=phase, submission=seen_submission, order=order)
    return SeenJob(record, order, state, **more)


def status(phase: JobPhase = JobPhase.FINISHED, submission: int = 1) -> RunStatus:
    return RunStatus(submission=submission, phase=phase)


def phases_of(parallel: int = 1, leader_s: float = 0.0, **given: SeenJob) -> dict[str, JobPhase]:
    return {name: state.phase for name, state in jobs.advance(given, parallel, leader_s).items()}


def test_queue_goes_by_priority_then_by_the_order_of_submissions() -> None:
    assert phases_of(a=job(order=3), b=job(order=2), c=job(order=9, priority=1))["c"] is JobPhase.STARTING
    states = jobs.advance({"a": job(order=3), "b": job(order=2)}, 1, 0.0)
    assert states["b"].phase is JobPhase.STARTING
    assert states["a"].reason == "waits for b: one job runs at a time (coordinator.parallel_jobs)"
    assert phases_of(parallel=2, a=job(order=3), b=job(order=2)) == dict.fromkeys("ab", JobPhase.STARTING)


def test_ended_job_keeps_its_place_until_its_driver_is_gone() -> None:
    done = status()
    ends = jobs.advance({"a": job(JobPhase.RUNNING, run=done, driver=Driver(gone=False)), "b": job()}, 1, 0.0)
    assert ends["a"].phase is JobPhase.RUNNING and "waits for the end of its driver" in ends["a"].reason
    assert ends["b"].phase is JobPhase.QUEUED
    assert phases_of(a=job(JobPhase.RUNNING, run=done))["a"] is JobPhase.FINISHED
    assert phases_of(a=job(JobPhase.RUNNING, run=status(submission=0)))["a"] is JobPhase.RUNNING
    assert phases_of(a=job(JobPhase.STARTING, stopped=True))["a"] is JobPhase.STOPPED
    assert phases_of(a=job(stopped=True))["a"] is JobPhase.STOPPED


def test_ended_job_is_queued_again_only_by_a_new_submission() -> None:
    assert phases_of(a=job(JobPhase.FINISHED, driver=Driver(runs=True, gone=False)))["a"] is JobPhase.FINISHED
    again = jobs.advance({"a": job(JobPhase.FINISHED, submission=2, seen=1, run=status(), order=7)}, 1, 0.0)["a"]
    assert again.phase is JobPhase.QUEUED and again.submission == 2 and again.order == 7


def test_job_that_was_never_submitted_has_no_place_in_the_queue() -> None:
    assert phases_of(a=job(None, submission=0), b=job(order=2)) == {"b": JobPhase.STARTING}


def test_job_runs_once_its_run_has_begun() -> None:
    assert phases_of(a=job(JobPhase.STARTING, driver=Driver(runs=True, gone=False)))["a"] is JobPhase.STARTING
    assert phases_of(a=job(JobPhase.STARTING, run=status(JobPhase.RUNNING)))["a"] is JobPhase.RUNNING


def test_run_that_was_stopped_has_its_driver_until_it_has_ended_in_order_or_its_time_is_over() -> None:
    """It has the time of its settings to commit what it has trained, and then the time to end."""
    runs = job(JobPhase.RUNNING, stopped=True, stop_s=20.0, driver=Driver(runs=True, gone=False))
    state = jobs.advance({"a": runs}, 1, 100.0, 40.0)["a"]
    assert state.phase is JobPhase.RUNNING and state.stop_deadline_s == 160.0 and "is stopping" in state.reason
    stopping = replace(runs, state=state)
    assert jobs.advance({"a": stopping}, 1, 130.0)["a"] == state and stopping.wants_driver(130.0)
    assert not stopping.wants_driver(160.0), "it is killed"
    assert not replace(stopping, run=status(JobPhase.STOPPED)).wants_driver(130.0), "it has ended"
    assert not replace(stopping, driver=Driver(gone=False)).wants_driver(130.0), "there is nothing to end in order"
    ended = jobs.advance({"a": replace(stopping, run=status(JobPhase.STOPPED), driver=Driver())}, 1, 130.0)["a"]
    assert ended.phase is JobPhase.STOPPED and not ended.stop_deadline_s


def test_run_that_was_stopped_keeps_its_driver_while_its_process_is_started_again_within_its_time() -> None:
    between = job(JobPhase.RUNNING, stopped=True, stop_s=20.0, driver=Driver(gone=False), run=status(JobPhase.RUNNING))
    state = jobs.advance({"a": between}, 1, 100.0, 40.0)["a"]
    assert state.phase is JobPhase.RUNNING and state.stop_deadline_s == 160.0
    assert replace(between, state=state).wants_driver(159.0) and not replace(between, state=state).wants_driver(160.0)
    assert not replace(between, driver=Driver()).wants_driver(130.0), "it is assigned to nobody"


def test_run_of_a_job_that_is_submitted_once_more_has_the_time_of_a_stop() -> None:
    again = job(JobPhase.RUNNING, submission=2, seen=1, driver=Driver(runs=True, gone=False),
                run=status(JobPhase.RUNNING))
    state = jobs.advance({"a": again}, 1, 100.0)["a"]
    assert state.phase is JobPhase.RUNNING and state.submission == 1 and state.stop_deadline_s == 220.0
    assert replace(again, state=state).wants_driver(219.0) and not replace(again, state=state).wants_driver(220.0)
    ended = jobs.advance({"a": replace(again, state=state, driver=Driver())}, 1, 130.0)["a"]
    assert (ended.phase, ended.submission) == (JobPhase.STOPPED, 1)
    assert jobs.advance({"a": replace(again, state=ended, driver=Driver())}, 1, 131.0)["a"].submission == 2


def test_stop_has_the_time_of_the_submission_that_runs_and_not_of_the_next_one() -> None:
    running = status(JobPhase.RUNNING).replace(stop_s=600.0)
    for submission in (1, 2):
        again = job(JobPhase.RUNNING, submission=submission, seen=1, stop_s=10.0, stopped=submission == 1,
                    driver=Driver(runs=True, gone=False), run=running)
        assert jobs.advance({"a": again}, 1, 100.0, 40.0)["a"].stop_deadline_s == 740.0
    older = job(JobPhase.RUNNING, submission=2, seen=2, stop_s=10.0, stopped=True, run=running,
                driver=Driver(runs=True, gone=False))
    assert jobs.advance({"a": older}, 1, 100.0, 40.0)["a"].stop_deadline_s == 150.0, "that run is over"


@pytest.mark.parametrize(("record", "submission", "stopped"), [
    (JobRecord(submission=3), 3, False), (JobRecord(submission=3, stopped=True), 3, True),
    (JobRecord(submission=4), 3, True), (None, 3, True), (None, 0, False), (JobRecord(submission=4), 0, False),
    (JobRecord(submission=4, stopped=True), 0, True)])
def test_submission_is_stopped_by_its_operator_by_the_next_one_and_with_its_job(
        record: JobRecord | None, submission: int, stopped: bool) -> None:
    assert is_stopped(record, submission) is stopped


@given(st.dictionaries(st.sampled_from("abcd"), st.builds(
    job, st.none() | st.sampled_from(list(JobPhase)), st.integers(1, 9), st.integers(1, 2), seen=st.just(1),
    priority=st.integers(0, 2), stopped=st.booleans(),
    run=st.none() | st.builds(status, st.sampled_from(list(JobPhase)), st.just(1)),
    driver=st.sampled_from([Driver(), Driver(gone=False), Driver(runs=True, gone=False)]))), st.integers(1, 3))
def test_no_pass_starts_more_jobs_than_may_run_or_revives_one(given_jobs: dict[str, SeenJob], parallel: int) -> None:
    states = jobs.advance(given_jobs, parallel, 0.0)
    live = [n for n, j in given_jobs.items() if j.state is not None and j.state.phase.live]
    started = [n for n, s in states.items() if s.phase is JobPhase.STARTING and n not in live]
    assert len(started) <= max(0, parallel - len(live))
    for name, state in states.items():
        before = given_jobs[name].state
        if before is not None and before.phase.ended and not state.phase.ended:
            assert state.phase is JobPhase.QUEUED and state.submission > before.submission


# -- keys and a pass ---------------------------------------------------------------------------------------------------
def test_keys_of_the_cluster_are_among_those_of_no_job() -> None:
    keys = ClusterKeys()
    assert keys.assignment("driver/j") == "/elastic_rl/_clusters/default/assignments/driver/j"
    assert keys.leader("r") == "/elastic_rl/_clusters/default/leader/r" and Keys("j").leader() == "/elastic_rl/j/leader"


def _stored(record: Any, revision: int = 5) -> Any:
    return Stored(record, revision, 1)


def test_job_whose_assignment_cannot_be_read_may_have_a_driver() -> None:
    keys = ClusterKeys()
    reading = _reading(
        (keys.job("j"), JobRecord(submission=1, stopped=True).encode()), (keys.assignment(driver_of("j")), b"{"),
        (keys.job_state("j"), JobState(phase=JobPhase.RUNNING, submission=1, order=1).encode()),
        (keys.job("k"), JobRecord(submission=1).encode()),
        (keys.job_state("k"), JobState(phase=JobPhase.QUEUED, submission=1, order=5).encode()))
    written = {w.key: w.record for w in cluster_pass(reading, ClusterLimits())}
    assert written.keys() == {keys.job_state("k")} and isinstance(written[keys.job_state("k")], JobState)
    assert written[keys.job_state("k")].phase is JobPhase.QUEUED, "its place is taken"


def test_host_with_a_record_that_cannot_be_read_gets_nothing_more() -> None:
    keys = ClusterKeys()
    hosts_of = [(key, value) for name in "ab" for key, value in (
        (keys.host(name), Host(id=name, incarnation="1").encode()),
        (keys.host_registration(name), Host(id=name, incarnation="1").encode()),
        (keys.host_status(name), HostStatus(registration=5).encode()),
        (keys.host_state(name), HostState(phase=HostPhase.READY, incarnation="1", since_s=0.0).encode()))]
    job = [(keys.job("j"), JobRecord(submission=1).encode()), (keys.job_state("j"), JobState(
        phase=JobPhase.STARTING, submission=1, order=1).encode())]

    def given_to(*more: tuple[str, bytes]) -> set[str]:
        return {w.record.host for w in cluster_pass(_reading(*hosts_of, *job, *more), ClusterLimits())
                if isinstance(w.record, Assignment)}

    assert given_to() == {"a"} and given_to((keys.host_spec("a"), b"{")) == {"b"}


def test_pass_names_all_that_each_write_was_decided_by() -> None:
    registration, keys = _stored(Host(id="a", incarnation="1")), ClusterKeys()
    new = ClusterReading(9, 0.0, {"a": registration}, {"a": registration})
    [write] = cluster_pass(new, ClusterLimits())
    assert write.key == keys.host_state("a") and {c.key for c in write.compares} == {
        keys.host("a"), keys.host_registration("a"), keys.host_spec("a"), keys.host_state("a")}
    state = HostState(phase=HostPhase.READY, incarnation="1", since_s=0.0)
    ready = replace(new, host_states={"a": _stored(state)}, host_statuses={"a": _stored(HostStatus(registration=5))})
    assert cluster_pass(ready, ClusterLimits()) == []
    starting = replace(ready, jobs={"j": _stored(JobRecord(submission=1))}, job_states={
        "j": _stored(JobState(phase=JobPhase.STARTING, submission=1, order=5, reason="waits for its driver to run"))})
    [write] = [w for w in cluster_pass(starting, ClusterLimits()) if isinstance(w.record, Assignment)]
    assert write.key == keys.assignment(driver_of("j")) and Compare.version(write.key, "==", 0) in write.compares
    queued = replace(starting, assignments={driver_of("j"): Stored(write.record, 7, 1)}, jobs={
        **starting.jobs, **{name: _stored(JobRecord(submission=1)) for name in "abk"}},
        job_states={**starting.job_states, "k": _stored(JobState(phase=JobPhase.QUEUED, submission=1, order=1))},
        spec=_stored(ClusterSpec(parallel_jobs=2)))
    writes = [w for w in cluster_pass(queued, ClusterLimits()) if isinstance(w.record, JobState)]
    assert [w.key for w in writes] == [keys.job_state(name) for name in "kabj"], "starts, phases, reasons"
    own = [{keys.job(name), keys.job_state(name), keys.run_status(name)} for name in "kabj"]
    assert [{c.key for c in w.compares} for w in writes] == [
        own[0] | {keys.spec(), keys.job_states_prefix()}, *own[1:]]


def test_driver_is_gone_once_its_host_has_seen_the_release() -> None:
    name, registration = driver_of("j"), _stored(Host(id="a", incarnation="1"))

    def gone(observed: int, service: ServiceStatus | None = None) -> bool:
        status = HostStatus(registration=5, observed_revision=observed, services={name: service} if service else {})
        return ClusterReading(9, 0.0, {"a": registration}, {"a": registration}, {"a": _stored(status)}, assignments={
            name: Stored(Assignment(), 8, 2)}).driver("j").gone

    assert gone(8) and not gone(7), "it may start the generation before"
    assert not gone(8, ServiceStatus(state=RunState.RUNNING, generation=1))


def _reading(*kvs: tuple[str, bytes]) -> ClusterReading:
    return ClusterReading.of(ClusterKeys(), [KeyValue(key, value, 1, 5, 1, 0) for key, value in kvs], 9, 0.0, {})


def test_job_with_a_record_that_cannot_be_read_is_left_as_it_is_with_its_place() -> None:
    keys = ClusterKeys()
    assigned = keys.assignment(driver_of("j")), Assignment(host="a", incarnation="1").encode()
    other = keys.job("k"), JobRecord(submission=1).encode()
    queued = keys.job_state("k"), JobState(phase=JobPhase.QUEUED, submission=1, order=5).encode()
    for broken in (keys.job("j"), keys.job_state("j"), keys.run_status("j")):
        kvs = [(keys.job("j"), JobRecord(submission=1).encode()), (broken, b"{")]
        reading = _reading(*dict(kvs).items(), assigned, other, queued)
        written = {w.key: w.record for w in cluster_pass(reading, ClusterLimits())}
        assert written.keys() == {keys.job_state("k")}, "neither released nor started"
        state = written[keys.job_state("k")]
        assert isinstance(state, JobState) and state.phase is JobPhase.QUEUED
    unassigned = _reading((keys.job("j"), b"{"), other, queued)
    started = [w.record.phase for w in cluster_pass(unassigned, ClusterLimits()) if isinstance(w.record, JobState)]
    assert started == [JobPhase.STARTING], "it takes no place"


def test_status_of_an_earlier_registration_is_no_evidence() -> None:
    registration = _stored(Host(id="a", incarnation="1"), 5)
    late = ClusterReading(9, 0.0, {"a": registration}, host_statuses={"a": _stored(HostStatus(registration=4))})
    assert late.seen_hosts["a"].status is None
