"""Hosts whose provider takes them back: the leader follows a notice with a drain, once, for that machine alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.cluster_pass import ClusterLimits, ClusterReading, ClusterWrite, Stored, cluster_pass
from elastic_rl.coordinator.hosts import state_machine as hosts
from elastic_rl.coordinator.hosts.state_machine import SeenHost
from elastic_rl.coordinator.hosts.times import LONGEST_DRAIN_S, HostTimes
from elastic_rl.etcd.cluster_records import (
    PREEMPTION,
    Assignment,
    Drain,
    Host,
    HostPhase,
    HostSpec,
    HostState,
    HostStatus,
    JobPhase,
    JobState,
    PreemptionNotice,
    driver_of,
)
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.record import Record
from elastic_rl.etcd.records import Event, Severity
from elastic_rl.etcd.transaction import KeyValue

TIMES = HostTimes()
NOW = 1.7e9
SPOT = PreemptionNotice(reason="aws: terminate", deadline_at=NOW + 120.0)
SOON = PreemptionNotice(reason="gcp: preempted")
OPERATOR = HostSpec(drain=Drain(within_s=600.0), by="ann", at=5.0)


class Cluster:
    """A host, its leader, and time."""

    def __init__(self) -> None:
        self.state: HostState | None = None
        self.spec = HostSpec()
        self.at_s = 0.0
        self.asked = 0
        """How often the leader has asked for a drain."""

    def look(self, notice: PreemptionNotice | None = None, *, incarnation: str | None = "1", holds: bool = True,
             has_run: bool = False, pause_s: float = 1.0, left_s: float | None = None, may_follow: bool = True
             ) -> HostState:
        """Two passes, the second of which sees what the first one has written. ``left_s``: what the agent says that
        the machine has left; None: as by a right clock."""
        self.at_s += pause_s
        for _ in range(2):
            seen = SeenHost(None if incarnation is None else Host(id="a", incarnation=incarnation),
                            None if incarnation is None else HostStatus(
                                registration=1, preemption=notice, preemption_left_s=left_s if notice is None or
                                left_s is not None else notice.left_s(NOW + self.at_s)), self.spec,
                            holds, has_run, NOW + self.at_s, may_follow)
            before, self.state = self.state, hosts.advance(self.state, seen, self.at_s, TIMES)
            assert self.state is not None
            spec = hosts.spec_after(before, self.state, seen)
            self.asked += spec != self.spec and spec.drain is not None
            self.spec = spec
        return self.state


@pytest.fixture
def ready() -> Cluster:
    cluster = Cluster()
    assert cluster.look().phase is HostPhase.READY
    return cluster


def test_notice_drains_the_host_for_half_of_its_time_so_that_engines_are_replaced(ready: Cluster) -> None:
    draining = ready.look(SPOT)
    assert draining.phase is HostPhase.DRAINING
    assert draining.reason == "drained by a notice of preemption: aws: terminate"
    assert draining.drain_deadline_s == ready.at_s + (120.0 - ready.at_s) / 2 and not draining.drain_overdue
    assert ready.look(SPOT, pause_s=90.0).drain_overdue
    assert ready.look(SPOT, holds=False).phase is HostPhase.LEFT
    assert ready.asked == 1


def test_run_leaves_at_once_since_it_needs_the_time_to_begin_elsewhere(ready: Cluster) -> None:
    assert ready.look(SPOT, has_run=True).drain_overdue


def test_notice_without_a_time_counts_from_when_it_is_read(ready: Cluster) -> None:
    draining = ready.look(SOON)
    assert draining.drain_deadline_s == ready.at_s + 15.0
    assert ready.look(SOON).drain_deadline_s == draining.drain_deadline_s


@pytest.mark.parametrize(("deadline_at", "within_s"), [(NOW - 600.0, 0.0), (NOW + 1e10, LONGEST_DRAIN_S)])
def test_deadline_by_a_wrong_clock_is_one_within_bounds(ready: Cluster, deadline_at: float, within_s: float) -> None:
    draining = ready.look(SPOT.replace(deadline_at=deadline_at))
    assert draining.drain_deadline_s == ready.at_s + within_s


def test_time_that_is_left_is_a_duration_of_the_host_and_only_becomes_less(ready: Cluster) -> None:
    """The clock of the leader's host is no part of it."""
    draining = ready.look(SPOT.replace(deadline_at=1.0), left_s=100.0)
    assert draining.drain_deadline_s == ready.at_s + 50.0
    same = ready.look(SPOT.replace(deadline_at=1.0), left_s=100.0, pause_s=5.0)
    assert same.drain_deadline_s == draining.drain_deadline_s, "a report is not written again each second"
    late = ready.look(SPOT.replace(deadline_at=1.0), left_s=3.0)
    assert late.drain_deadline_s == ready.at_s + 3.0, "nobody led meanwhile"
    assert ready.asked == 1


def test_notice_of_an_agent_of_an_older_release_goes_by_its_deadline() -> None:
    registered, spec = Host(id="a", incarnation="1"), HostSpec()
    notice = SPOT.replace(deadline_at=NOW + 100.0)
    status = HostStatus(registration=1, preemption=notice)
    state = HostState(phase=HostPhase.READY, incarnation="1", since_s=0.0)
    after = hosts.advance(state, SeenHost(registered, status, spec, True, unix_s=NOW), 7.0, TIMES)
    assert after is not None and after.preemption_deadline_s == 7.0 + 50.0
    assert hosts.advance(after, SeenHost(registered, status, spec, True, unix_s=NOW + 90.0), 8.0, TIMES) == after
    assert SeenHost(registered, status.replace(preemption=SPOT.replace(deadline_at=0.0)), spec, True, unix_s=NOW
                    ).left_s == SPOT.warning_s


def test_notice_that_may_not_be_followed_waits_until_it_may(ready: Cluster) -> None:
    waiting = ready.look(SPOT, may_follow=False)
    assert waiting.phase is HostPhase.READY and waiting.preemption_pending and ready.asked == 0
    draining = ready.look(SPOT)
    assert draining.phase is HostPhase.DRAINING and not draining.preemption_pending and ready.asked == 1
    assert not ready.look(None).preemption_pending


@given(share=st.floats(0.01, 1.0), hosts_of=st.lists(st.tuples(
    st.sampled_from(["plain", "waits", "drained", "by ann", "gone"]), st.floats(0, 300)), max_size=12))
def test_notices_drain_no_more_than_their_share_of_the_hosts(share: float, hosts_of: list[tuple[str, float]]) -> None:
    seen_hosts = {}
    for number, (kind, left_s) in enumerate(hosts_of):
        notice = SPOT if kind in ("waits", "drained") else None
        by = {"drained": PREEMPTION, "by ann": "ann"}.get(kind, "")
        seen_hosts[f"h{number}"] = SeenHost(
            None if kind == "gone" else Host(id=f"h{number}", incarnation="1"),
            HostStatus(registration=1, preemption=notice, preemption_left_s=left_s),
            HostSpec(drain=Drain(within_s=1.0) if by else None, by=by), holds=True)
    states = {name: HostState(phase=HostPhase.READY, incarnation="1", since_s=0.0) for name in seen_hosts}
    chosen = hosts.followed_now(seen_hosts, states, share)
    kinds = [kind for kind, _ in hosts_of]
    most = max(1, int(share * (len(kinds) - kinds.count("gone"))))
    waiting = {name for name, seen in seen_hosts.items() if kinds[int(name[1:])] == "waits"}
    assert chosen <= waiting
    assert len(chosen) == min(len(waiting), max(0, most - kinds.count("drained")))
    assert all(seen_hosts[a].left_s <= seen_hosts[b].left_s for a in chosen for b in waiting - chosen)


def test_drain_stays_when_the_notice_is_withdrawn_until_an_operator_takes_it_back(ready: Cluster) -> None:
    ready.look(SPOT)
    assert ready.look(None).phase is HostPhase.DRAINING
    ready.spec = ready.spec.replace(drain=None, by="ann", at=9.0)
    assert ready.look(None).phase is HostPhase.READY
    assert ready.look(SPOT).phase is HostPhase.DRAINING and ready.asked == 2, "it is another notice"


def test_operator_is_not_overruled_by_the_same_notice(ready: Cluster) -> None:
    ready.look(SPOT)
    ready.spec = ready.spec.replace(drain=None, by="ann", at=9.0)
    assert ready.look(SPOT).phase is HostPhase.READY and ready.asked == 1
    sooner = SPOT.replace(deadline_at=SPOT.deadline_at - 60.0)
    assert ready.look(sooner).phase is HostPhase.DRAINING, "it says something new"


def test_drain_of_an_operator_stays_and_waits_no_longer_than_the_machine_has(ready: Cluster) -> None:
    ready.spec = OPERATOR
    assert ready.look().drain_deadline_s == ready.at_s + 600.0
    draining = ready.look(SPOT)
    assert ready.spec == OPERATOR and draining.reason == "drained by ann"
    assert draining.drain_deadline_s == draining.preemption_deadline_s < ready.at_s + 60.0
    ready.spec = OPERATOR.replace(at=6.0)
    assert ready.look(SPOT).drain_deadline_s == draining.drain_deadline_s, "asked for once more"


def test_next_machine_of_the_name_begins_without_the_drain(ready: Cluster) -> None:
    ready.look(SPOT)
    ready.look(SPOT, holds=False)
    assert ready.look(incarnation=None).phase is HostPhase.LEFT
    ready.look(incarnation="2", holds=False)
    again = ready.look(incarnation="2", holds=False)
    assert again.phase is HostPhase.READY and again.preemption is None
    assert ready.spec.drain is None and "machine that it was for is gone" in ready.spec.reason


def test_machine_that_was_cut_off_and_returns_is_still_drained(ready: Cluster) -> None:
    ready.look(SPOT)
    ready.look(incarnation=None)
    assert ready.look(incarnation=None, pause_s=60.0).phase is HostPhase.LOST
    ready.look(SPOT)
    assert ready.look(SPOT).phase is HostPhase.DRAINING and ready.asked == 1


def test_drain_of_an_operator_holds_for_the_next_machine_too(ready: Cluster) -> None:
    ready.spec = OPERATOR
    ready.look(SPOT)
    ready.look(incarnation="2")
    assert ready.look(incarnation="2").phase is HostPhase.DRAINING


steps = st.lists(st.tuples(
    st.sampled_from([None, "1", "2"]), st.sampled_from([None, SPOT, SOON]), st.booleans(),
    st.sampled_from(["", "uncordon", "drain"]), st.floats(0.1, 60.0)), max_size=25)


@given(steps)
def test_each_notice_is_followed_once_and_by_the_machine_that_it_is_for_alone(
        story: list[tuple[str | None, PreemptionNotice | None, bool, str, float]]) -> None:
    cluster = Cluster()
    cluster.look()
    last: tuple[str, PreemptionNotice | None] = "1", None
    for number, (incarnation, notice, holds, operator, pause_s) in enumerate(story):
        if operator:
            drain = Drain(within_s=600.0) if operator == "drain" else None
            cluster.spec = cluster.spec.replace(drain=drain, by="ann", at=float(number + 1))
        asked = cluster.asked
        state = cluster.look(notice, incarnation=incarnation, holds=holds, pause_s=pause_s)
        if incarnation is None:
            assert cluster.asked == asked
            continue
        drain = cluster.spec.drain
        if (incarnation, notice) == last:
            assert cluster.asked == asked, "it was followed before"
        elif notice is not None:
            assert drain is not None and cluster.asked <= asked + 1
        if drain is not None and drain.incarnation:
            assert drain.incarnation == incarnation and cluster.spec.by == PREEMPTION
        if state.phase in (HostPhase.DRAINING, HostPhase.LEFT):
            assert drain is not None
            assert not state.preemption_deadline_s or state.drain_deadline_s <= state.preemption_deadline_s
        last = incarnation, notice


# -- the pass ----------------------------------------------------------------------------------------------------------
KEYS = ClusterKeys()


def _stored(record: Record) -> Stored[Record]:
    return Stored(record, 5, 1)


def _reading(status: HostStatus, spec: HostSpec = HostSpec(), incarnation: str = "1") -> ClusterReading:
    records: Mapping[str, Record] = {
        KEYS.host("a"): Host(id="a", incarnation=incarnation), KEYS.host_status("a"): status,
        KEYS.host_registration("a"): Host(id="a", incarnation=incarnation), KEYS.host_spec("a"): spec,
        KEYS.host_state("a"): HostState(phase=HostPhase.READY, incarnation="1", since_s=0.0),
        KEYS.assignment(driver_of("j")): Assignment(host="a", incarnation="1"),
        KEYS.job_state("j"): JobState(phase=JobPhase.RUNNING, submission=1, order=1),
        KEYS.job_state("k"): JobState(phase=JobPhase.QUEUED, submission=1, order=2)}
    return ClusterReading.of(KEYS, [KeyValue(key, record.encode(), 1, 5, 1, 0) for key, record in records.items()], 9,
                             0.0, {}, unix_s=NOW)


def _of_host(reading: ClusterReading) -> list[ClusterWrite]:
    return [w for w in cluster_pass(reading, ClusterLimits()) if isinstance(w.record, (HostState, HostSpec))]


def test_notice_its_drain_and_its_event_are_one_write() -> None:
    [write] = _of_host(_reading(HostStatus(registration=5, preemption=SPOT, preemption_left_s=119.6)))
    assert write.key == KEYS.host_state("a") and KEYS.host_spec("a") in {c.key for c in write.compares}
    spec_op, *events = write.also
    assert spec_op.key == KEYS.host_spec("a")
    spec = HostSpec.decode(spec_op.data)
    assert spec.drain == Drain(within_s=0.0, incarnation="1") and spec.reason == SPOT.reason
    assert [op.key.startswith(Keys("j").events_prefix()) for op in events] == [True], "of the active job alone"
    event = Event.decode(events[0].data)
    assert (event.kind, event.subject, event.severity) == ("host.preemption", "a", Severity.WARNING)
    assert event.message == "host a is about to be taken back (aws: terminate), in 120 s: it is drained"


def test_notices_of_all_hosts_drain_some_and_give_one_alert_about_the_others() -> None:
    names = [f"h{number}" for number in range(6)]
    records: dict[str, Record] = {KEYS.job_state("j"): JobState(phase=JobPhase.RUNNING, submission=1, order=1)}
    for name in names:
        records |= {KEYS.host(name): Host(id=name, incarnation="1"),
                    KEYS.host_registration(name): Host(id=name, incarnation="1"),
                    KEYS.host_status(name): HostStatus(registration=5, preemption=SOON, preemption_left_s=30.0),
                    KEYS.host_state(name): HostState(phase=HostPhase.READY, incarnation="1", since_s=0.0)}
    kinds = []
    for _ in range(2):  # the second pass reads what the first one has written
        reading = ClusterReading.of(KEYS, [KeyValue(key, record.encode(), 1, 5, 1, 0)
                                           for key, record in records.items()], 9, 0.0, {}, unix_s=NOW)
        for write in _of_host(reading):
            records[write.key] = write.record
            records |= {op.key: HostSpec.decode(op.data) for op in write.also
                        if op.key.startswith(KEYS.host_specs_prefix())}
            kinds += [Event.decode(op.data).kind for op in write.also if op.key.startswith(Keys("j").events_prefix())]
    drained = [name for name in names if KEYS.host_spec(name) in records]
    assert drained == names[:3] and kinds == ["host.preemption"] * 3 + ["host.preemption_pending"]


def test_event_says_that_an_operator_had_the_host_drained_already() -> None:
    [write] = _of_host(_reading(HostStatus(registration=5, preemption=SPOT), OPERATOR))
    [op] = write.also
    assert "it is drained by ann already" in Event.decode(op.data).message


def test_notice_of_an_earlier_registration_is_none() -> None:
    assert _of_host(_reading(HostStatus(registration=4, preemption=SPOT))) == []


def test_drain_of_a_machine_that_is_gone_is_taken_back() -> None:
    void = HostSpec(drain=Drain(within_s=9.0, incarnation="0"), by=PREEMPTION, reason="x", at=3.0)
    reading = _reading(HostStatus(registration=5), void)
    assert hosts.is_fit(reading.host_states["a"].record, reading.seen_hosts["a"])
    [write] = _of_host(reading)
    assert write.key == KEYS.host_spec("a") and isinstance(write.record, HostSpec) and write.record.drain is None
    unregistered = replace(reading, hosts={})
    assert reading.seen_hosts["a"].drain is None and unregistered.seen_hosts["a"].drain is not None
