"""One pass of the cluster's leader: from what etcd says to what is to be written. Pure.

The leader reads the whole cluster at one revision, asks the state machines of hosts, jobs and assignments, and writes
each record that differs, under its fencing token and the conditions that ``ClusterWrite`` names. It keeps nothing in
memory, so the next leader goes on from the records.

The conditions are needed although only the leader writes these records: its own write may arrive late, after a later
pass has decided by other facts, while it leads all the time. So each write names everything that it was decided by. The
transition that must NOT exist is a write whose reasons no longer hold: a host LOST that has registered meanwhile, a
singleton on a host that was just cordoned, one more job than may run at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Generic, TypeVar

from elastic_rl.coordinator.assignments import state_machine as assignments
from elastic_rl.coordinator.assignments.state_machine import AssignableHost, AssignmentLimits, Decision, Singleton
from elastic_rl.coordinator.hosts import state_machine as hosts
from elastic_rl.coordinator.hosts.state_machine import SeenHost
from elastic_rl.coordinator.hosts.times import HostTimes
from elastic_rl.coordinator.jobs import state_machine as jobs
from elastic_rl.coordinator.jobs.state_machine import Driver, SeenJob
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.cluster_records import (
    PREEMPTION,
    Assignment,
    ClusterSpec,
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
    driver_of,
    job_of_driver,
)
from elastic_rl.etcd.decoding import RangeDecoder
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.record import Record
from elastic_rl.etcd.records import Severity
from elastic_rl.etcd.transaction import Compare, KeyValue, Op

R = TypeVar("R", bound=Record)

_EVENTS = 100
"""Most events of one write: etcd takes 128 operations in a transaction."""


@dataclass(frozen=True)
class Stored(Generic[R]):
    """A record with the revision of its last change and the number of puts since its key was created."""

    record: R
    mod_revision: int
    version: int


@dataclass(frozen=True)
class ClusterLimits:
    times: HostTimes = HostTimes()
    assignments: AssignmentLimits = AssignmentLimits()
    stop_run_s: float = jobs.STOP_RUN_S
    """Longest time for a run that was stopped to end in order, in seconds of the leader clock."""


@dataclass(frozen=True)
class ClusterWrite:
    """One record that is to be written, and the conditions under which it is right."""

    key: str
    record: Record
    compares: tuple[Compare, ...]
    also: tuple[Op, ...] = ()
    """What is written with it, or not at all."""

    @property
    def op(self) -> Op:
        return Op.put(self.key, self.record.encode())


@dataclass(frozen=True)
class ClusterReading:
    """What etcd said about the cluster at one revision. Every mapping is by the name in the key."""

    revision: int
    leader_s: float
    """Seconds of the leader clock."""
    hosts: Mapping[str, Stored[Host]] = field(default_factory=dict)
    host_registrations: Mapping[str, Stored[Host]] = field(default_factory=dict)
    host_statuses: Mapping[str, Stored[HostStatus]] = field(default_factory=dict)
    host_specs: Mapping[str, Stored[HostSpec]] = field(default_factory=dict)
    host_states: Mapping[str, Stored[HostState]] = field(default_factory=dict)
    assignments: Mapping[str, Stored[Assignment]] = field(default_factory=dict)
    jobs: Mapping[str, Stored[JobRecord]] = field(default_factory=dict)
    job_states: Mapping[str, Stored[JobState]] = field(default_factory=dict)
    run_statuses: Mapping[str, Stored[RunStatus]] = field(default_factory=dict)
    spec: Stored[ClusterSpec] | None = None
    movable: frozenset[str] = frozenset()
    """Singletons whose holders lose nothing when they move now."""
    keys: ClusterKeys = ClusterKeys()
    untouched_jobs: frozenset[str] = frozenset()
    """Jobs with a record that cannot be read, such as one of a later release: nothing of them is changed, and one
    that has a driver keeps its place among those that run."""

    damaged_assignments: frozenset[str] = frozenset()
    """Untouched jobs whose assignment is the record that cannot be read: they may have a driver."""
    untouched_hosts: frozenset[str] = frozenset()
    """Hosts with a record that cannot be read: they keep what they hold, and get nothing more."""
    unix_s: float = 0.0
    """Unix seconds, by the clock of the leader's host."""

    @classmethod
    def of(cls, keys: ClusterKeys, kvs: Sequence[KeyValue], revision: int, leader_s: float,
           unreadable: MutableMapping[str, str], decoders: MutableMapping[str, RangeDecoder[Any]] | None = None, *,
           unix_s: float = 0.0) -> ClusterReading:
        """The reading of all keys of the cluster. A record that cannot be read is left out and reported in
        ``unreadable``, by key. ``decoders``: by prefix, kept for the next reading."""
        decoders = decoders if decoders is not None else {}
        ranges = defaultdict[str, list[KeyValue]](list)
        root = len(keys.root)
        for kv in kvs:
            ranges[kv.key[:kv.key.find("/", root) + 1] or kv.key].append(kv)  # its prefix, or a key without one

        def stored(prefix: str, kind: type[R]) -> dict[str, Stored[R]]:
            decoder: RangeDecoder[R] | None = decoders.get(prefix)
            if decoder is None:
                decoder = decoders[prefix] = RangeDecoder(kind)
            found = decoder.decode_with_keys(ranges[prefix], unreadable)
            return {kv.key[len(prefix):]: Stored(record, kv.mod_revision, kv.version) for record, kv in found}

        found = cls(revision, leader_s, stored(keys.hosts_prefix(), Host),
                   stored(keys.host_registrations_prefix(), Host),
                   stored(keys.host_statuses_prefix(), HostStatus), stored(keys.host_specs_prefix(), HostSpec),
                   stored(keys.host_states_prefix(), HostState), stored(keys.assignments_prefix(), Assignment),
                   stored(keys.jobs_prefix(), JobRecord), stored(keys.job_states_prefix(), JobState),
                   stored(keys.run_statuses_prefix(), RunStatus), stored(keys.spec(), ClusterSpec).get(""), keys=keys,
                   unix_s=unix_s)

        def damaged(*prefixes: str) -> frozenset[str]:
            return frozenset(key.removeprefix(prefix) for prefix in prefixes for key in unreadable
                             if key.startswith(prefix))

        assigned = frozenset(map(job_of_driver, damaged(keys.assignments_prefix())))
        return replace(found, damaged_assignments=assigned, untouched_jobs=assigned | damaged(
            keys.jobs_prefix(), keys.job_states_prefix(), keys.run_statuses_prefix()), untouched_hosts=damaged(
            keys.hosts_prefix(), keys.host_registrations_prefix(), keys.host_statuses_prefix(),
            keys.host_specs_prefix(), keys.host_states_prefix()))

    @cached_property
    def seen_hosts(self) -> Mapping[str, SeenHost]:
        """All hosts that are registered or were."""
        return {name: self._seen_host(name) for name in sorted({*self.hosts, *self.host_states})}

    def _seen_host(self, name: str) -> SeenHost:
        registered, status, spec = self.hosts.get(name), self.host_statuses.get(name), self.host_specs.get(name)
        current = (status.record if registered is not None and status is not None
                   and status.record.registration == registered.mod_revision else None)
        holds = self.assigned[name] > 0 or current is not None and any(
            service.generation and service.state is RunState.RUNNING for service in current.services.values())
        registration, state = self.host_registrations.get(name), self.host_states.get(name)
        registered_again = (registration is not None and state is not None
                        and registration.mod_revision > state.mod_revision)
        return SeenHost(registered.record if registered else None, current, spec.record if spec else HostSpec(), holds,
                        self.assigned[name] > 0, self.unix_s, registered_again=registered_again)

    @cached_property
    def assigned(self) -> Counter[str]:
        """Number of singletons that each host holds."""
        return Counter(a.record.host for a in self.assignments.values() if a.record.host)

    def driver(self, job: str) -> Driver:
        """The driver of a job, as assignments and agents have it."""
        name = driver_of(job)
        stored = self.assignments.get(name)
        if stored is None:
            return Driver()
        now, where = stored.record, self.seen_hosts.get(stored.record.host)
        if not now.host:
            return Driver(gone=all(self._is_gone(name, stored.mod_revision, host) for host in self.seen_hosts))
        service = where.status.services.get(name) if where is not None and where.status is not None else None
        if service is None or service.generation != stored.version:
            return Driver(gone=False, waits_for=f"host {now.host} is about to start its driver")
        return Driver(service.state is RunState.RUNNING, gone=False, waits_for=service.reason)

    def _is_gone(self, singleton: str, released_revision: int, host: str) -> bool:
        """Whether a host runs nothing of a singleton that was released, or is not heard for good."""
        state, seen = self.host_states.get(host), self.seen_hosts[host]
        if state is not None and state.record.phase in (HostPhase.LOST, HostPhase.LEFT):
            return True
        if seen.status is None or seen.status.observed_revision < released_revision:
            return False
        service = seen.status.services.get(singleton)
        return service is None or service.state is not RunState.RUNNING


def cluster_pass(reading: ClusterReading, limits: ClusterLimits) -> list[ClusterWrite]:
    """What the leader is to write now; nothing while the cluster is as it is to be."""
    host_writes = _host_writes(reading, limits)
    seen_jobs = {name: _seen_job(reading, name) for name in reading.jobs if name not in reading.untouched_jobs}
    decisions = _decisions(reading, seen_jobs, host_writes.keys(), limits)
    seen_jobs = {name: replace(job, driver=replace(job.driver, waits_for=decisions.get(
        driver_of(name), Decision()).waits_for or job.driver.waits_for)) for name, job in seen_jobs.items()}
    return [*host_writes.values(), *_job_writes(reading, seen_jobs, limits), *_assignment_writes(reading, decisions)]


def _host_writes(reading: ClusterReading, limits: ClusterLimits) -> dict[str, ClusterWrite]:
    spec = reading.spec.record if reading.spec is not None else ClusterSpec()
    states = {name: stored.record for name, stored in reading.host_states.items()}
    noticed = {name for name, seen in reading.seen_hosts.items() if seen.status is not None and seen.status.preemption}
    follow = hosts.followed_now(reading.seen_hosts, states, spec.max_preempted_share) if noticed else frozenset()
    silent = any(state.preemption_pending for state in states.values())  # they had one event, and need no further one
    writes = dict[str, ClusterWrite]()
    for name, seen in reading.seen_hosts.items():
        if name in reading.untouched_hosts:
            continue
        waits = name in noticed and name not in follow
        write = _host_write(reading, name, replace(seen, may_follow=False) if waits else seen, limits)
        if write is None:
            continue
        if isinstance(write.record, HostState) and write.record.preemption_pending and not silent:
            silent, event = True, _pending_events(reading, name, spec.max_preempted_share)
            write = replace(write, also=(*write.also, *event))
        writes[name] = write
    return writes


def _host_write(reading: ClusterReading, name: str, seen: SeenHost, limits: ClusterLimits) -> ClusterWrite | None:
    before = _record(reading.host_states, name)
    after = hosts.advance(before, seen, reading.leader_s, limits.times)
    if after is None:
        return None
    spec, unchanged = hosts.spec_after(before, after, seen), _host_unchanged(reading, name)
    new_spec = ClusterWrite(reading.keys.host_spec(name), spec, unchanged) if spec != seen.spec else None
    if after == before:
        return new_spec
    also = [*([new_spec.op] if new_spec is not None else ()), *_preemption_events(reading, name, before, after, spec)]
    return ClusterWrite(reading.keys.host_state(name), after, unchanged, tuple(also))


def _preemption_events(reading: ClusterReading, name: str, before: HostState | None, after: HostState, spec: HostSpec
                       ) -> Iterable[Op]:
    """An event in the log of each active job, whose engines, versions or run may be on the host."""
    if (notice := hosts.followed_notice(before, after)) is None:
        return
    by_notice = spec.drain is not None and spec.by == PREEMPTION
    left_s = reading.seen_hosts[name].left_s
    message = (f"host {name} is about to be taken back ({notice.reason}), in {left_s:.0f} s: "
               + ("it is drained" if by_notice else f"it is {spec.described('drained')} already"))
    for job in _active_jobs(reading):
        yield events.put_op(Keys(job), events.build(
            event_kinds.HOST_PREEMPTION, name, message, severity=Severity.WARNING, at=reading.unix_s,
            deadline_at=notice.deadline_at, incarnation=after.incarnation))


def _pending_events(reading: ClusterReading, name: str, share: float) -> Iterable[Op]:
    """An event in the log of each active job: the first notice that is not followed, whatever their number."""
    message = (f"host {name}, and perhaps more, are about to be taken back by what their provider says, and are not "
               f"drained: notices drain {share:.0%} of the hosts at the same time (coordinator.max_preempted_share). "
               "Where they are true, `elastic-rl drain` does not wait; else look at what answers for the provider")
    for job in _active_jobs(reading):
        yield events.put_op(Keys(job), events.build(
            event_kinds.HOST_PREEMPTION_PENDING, name, message, severity=Severity.ERROR, at=reading.unix_s))


def _active_jobs(reading: ClusterReading) -> list[str]:
    """The jobs that run, no more than one write may have events for."""
    return sorted(job for job, state in reading.job_states.items() if state.record.phase.live)[:_EVENTS]


def _seen_job(reading: ClusterReading, name: str) -> SeenJob:
    job, state = reading.jobs[name], _record(reading.job_states, name)
    live = state is not None and state.phase.live  # of other jobs no assignment is looked at: there may be many
    return SeenJob(job.record, job.mod_revision, state, _record(reading.run_statuses, name),
                   reading.driver(name) if live else Driver())


def _job_writes(reading: ClusterReading, seen_jobs: Mapping[str, SeenJob], limits: ClusterLimits
                ) -> list[ClusterWrite]:
    """First a job that starts, then other changes of a phase, then reasons: a start depends on the states of all jobs,
    so that it is refused after any other write of the same pass."""
    spec = reading.spec.record if reading.spec is not None else ClusterSpec()
    untouched = {job for name, a in reading.assignments.items()
                 if a.record.host and (job := job_of_driver(name)) in reading.untouched_jobs}
    parallel = max(0, spec.parallel_jobs - len(untouched | reading.damaged_assignments))
    writes = []
    for name, after in jobs.advance(seen_jobs, parallel, reading.leader_s, limits.stop_run_s).items():
        before = _record(reading.job_states, name)
        if after == before:
            continue
        compares = [_unchanged(reading.keys.job(name), reading.jobs.get(name)),
                    _unchanged(reading.keys.job_state(name), reading.job_states.get(name)),
                    _unchanged(reading.keys.run_status(name), reading.run_statuses.get(name))]
        starts, same = after.phase is JobPhase.STARTING, before is not None and before.phase is after.phase
        if starts and not same:  # no more than may run at once, and none before its turn
            compares += [_unchanged(reading.keys.spec(), reading.spec),
                         Compare.none_changed_since(reading.keys.job_states_prefix(), reading.revision)]
        writes.append((2 if same else 0 if starts else 1,
                       ClusterWrite(reading.keys.job_state(name), after, tuple(compares))))
    return [write for _, write in sorted(writes, key=itemgetter(0))]


def _decisions(reading: ClusterReading, seen_jobs: Mapping[str, SeenJob], changing: Collection[str],
               limits: ClusterLimits) -> dict[str, Decision]:
    """What is to become of each assignment, by the singleton's name. ``changing``: hosts whose state is written in this
    pass."""
    wanted: dict[str, dict[str, Any]] = {}
    for name, job in seen_jobs.items():
        if job.wants_driver(reading.leader_s):
            wanted[driver_of(name)] = {"job": name, "submission": job.record.submission}
    decisions = {}
    for name in sorted({*wanted, *reading.assignments}):
        stored = reading.assignments.get(name)
        now, generation = (stored.record, stored.version) if stored else (Assignment(), 0)
        if name in wanted:
            home = seen_jobs[wanted[name]["job"]].record.host
            singleton = Singleton(name, wanted[name], movable=name in reading.movable, home=home)
            decisions[name] = assignments.decide(singleton, now, generation, _assignable(reading, name, changing),
                                                 reading.leader_s, limits.assignments)
        elif now.host and job_of_driver(name) not in reading.untouched_jobs:
            decisions[name] = Decision(assignments.released(now, "no job wants it"))
    return decisions


def _assignment_writes(reading: ClusterReading, decisions: Mapping[str, Decision]) -> Iterable[ClusterWrite]:
    job_of = {driver_of(name): name for name in reading.jobs}
    for name, decision in decisions.items():
        if (after := decision.assignment) is not None:
            stored = reading.assignments.get(name)
            concerned = sorted({after.host, stored.record.host if stored else ""} - {""})
            yield ClusterWrite(reading.keys.assignment(name), after, (
                Compare.version(reading.keys.assignment(name), "==", stored.version if stored else 0),
                *_job_unchanged(reading, job_of.get(name)),
                *(compare for host in concerned for compare in _host_unchanged(reading, host))))


def _assignable(reading: ClusterReading, singleton: str, changing: Collection[str]) -> dict[str, AssignableHost]:
    found = {}
    for name, stored in reading.host_states.items():
        seen = reading.seen_hosts[name]
        service = seen.status.services.get(singleton) if seen.status is not None else None
        found[name] = AssignableHost(stored.record, hosts.is_fit(stored.record, seen),
                                     name in changing or name in reading.untouched_hosts,
                                     reading.assigned[name], service)
    return found


def _host_unchanged(reading: ClusterReading, name: str) -> tuple[Compare, ...]:
    return (_unchanged(reading.keys.host(name), reading.hosts.get(name)),
            _unchanged(reading.keys.host_registration(name), reading.host_registrations.get(name)),
            _unchanged(reading.keys.host_spec(name), reading.host_specs.get(name)),
            _unchanged(reading.keys.host_state(name), reading.host_states.get(name)))


def _job_unchanged(reading: ClusterReading, name: str | None) -> tuple[Compare, ...]:
    if name is None:
        return ()
    return (_unchanged(reading.keys.job(name), reading.jobs.get(name)),
            _unchanged(reading.keys.job_state(name), reading.job_states.get(name)))


def _unchanged(key: str, stored: Stored[R] | None) -> Compare:
    return Compare.mod(key, "==", stored.mod_revision if stored is not None else 0)


def _record(stored: Mapping[str, Stored[R]], name: str) -> R | None:
    found = stored.get(name)
    return found.record if found is not None else None
