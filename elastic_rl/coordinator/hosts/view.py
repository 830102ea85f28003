"""Hosts as the API shows them: what their agents registered and report, what the leader concluded, what operators want.

``view`` is pure. A listing reads ranges of keys, never one host after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict

from elastic_rl.coordinator.etags import etag
from elastic_rl.coordinator.leader_clock import LeaderTime
from elastic_rl.coordinator.problems import not_found
from elastic_rl.etcd.client import EtcdClient, KeyValue, Op
from elastic_rl.etcd.cluster_records import (
    Assignment,
    Host,
    HostPhase,
    HostSpec,
    HostState,
    HostStatus,
    PreemptionNotice,
    ServiceStatus,
)
from elastic_rl.etcd.decoding import decode, readable, readable_one
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.record import Record
from elastic_rl.etcd.transaction import TxnResult

R = TypeVar("R", bound=Record)


class HostAssignment(BaseModel):
    """A singleton that is assigned to a host."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    generation: int
    """Generation of the assignment; the service of the same name runs it once it has that generation."""
    incarnation: str
    """Incarnation of the host that it was assigned to. The assignment is void once the host has another one."""
    reason: str
    """Why this generation was begun."""


class HostView(BaseModel):
    """A host of the cluster, also one that is no longer registered. What its agent registered is shown as of the last
    registration."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    phase: HostPhase | None
    """What the leader concluded. ``joining`` while it has written nothing about the host since that booted; null where
    the leader's record cannot be read."""
    phase_age_s: float | None = None
    """Seconds since the phase began, at least: as of the leader's last write of its clock, and without the time that
    had no leader. Null where the leader has not decided about the host."""
    reason: str = ""
    """Why the host is in this phase."""
    registered: bool
    """Whether the host's agent holds its lease now."""
    not_ready: str = ""
    """Why the host can take no singleton now, as its agent reports; else empty."""
    preemption: PreemptionNotice | None = None
    """The notice that its provider takes the machine back, as its agent reports it; null while there is none."""
    preemption_pending: bool = False
    """Whether the host is not drained for that notice yet, since notices drain as many hosts already as they may
    (``coordinator.max_preempted_share``)."""
    preemption_problem: str = ""
    """Why its agent cannot tell whether there is such a notice; empty while it can, and where nothing is asked."""
    incarnation: str = ""
    """Random; differs after each boot of the host."""
    address: str = ""
    """Address under which other hosts reach it."""
    cpus: int | None = None
    """This and the following are null where what its agent registered cannot be read."""
    gpus: int | None = None
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    labels: dict[str, str] = {}
    release: str = ""
    """Release of elastic-rl that its agent runs."""
    spec: HostSpec = HostSpec()
    """What operators want of the host. A drain goes before a cordon."""
    etag: str = etag(0)
    """For If-Match of a change of what operators want; it differs after each one."""
    services: dict[str, ServiceStatus] = {}
    """Services by name, as the host's agent reports them; empty while its present registration has no report."""
    assignments: dict[str, HostAssignment] = {}
    """Singletons that are assigned to the host, by name."""
    unreadable: dict[str, str] = {}
    """Records of the host that this release cannot read, by key, and why. What they say is missing above."""


def view(keys: ClusterKeys, name: str, found: Mapping[str, KeyValue],
         assigned: Mapping[str, HostAssignment] = {}, leader_s: float | None = None) -> HostView | None:
    """A host as those of its keys say that are in ``found``; None for one that has neither registered nor a state.

    ``assigned``: the singletons that are assigned to it. ``leader_s``: seconds of the leader clock at a time no later
    than that of ``found``; None where it has never been written.
    """
    unreadable: dict[str, str] = {}

    def read(key: str, kind: type[R]) -> R | None:
        return decode(found[key], kind, unreadable) if key in found else None

    state_key, lease = keys.host_state(name), found.get(keys.host(name))
    if lease is None and state_key not in found and keys.host_registration(name) not in found:
        return None
    host = read(keys.host(name), Host) or read(keys.host_registration(name), Host)
    state, spec = read(state_key, HostState), read(keys.host_spec(name), HostSpec) or HostSpec()
    status = read(keys.host_status(name), HostStatus)
    if lease is None or (status is not None and status.registration != lease.mod_revision):
        status = None  # the report of an earlier registration
    decided = state_key in found
    if state is not None and lease is not None and host is not None and host.incarnation != state.incarnation:
        decided = False  # what the leader concluded before the host booted says nothing about it now
    concluded: dict[str, Any] = {"phase": None}
    if not decided:
        concluded = {"phase": HostPhase.JOINING, "reason": "the leader has not decided about it yet"}
    elif state is not None:
        age_s = max(0.0, leader_s - state.since_s) if leader_s is not None else None
        concluded = {"phase": state.phase, "reason": state.reason, "phase_age_s": age_s}
    if host is not None:
        registered = host.model_dump(exclude={"id", "machine", "log_port", "run_dir"})
    else:
        registered = {"incarnation": state.incarnation} if state is not None else {}
    return HostView(
        id=name, registered=lease is not None, **concluded, **registered, spec=spec,
        etag=etag(found[keys.host_spec(name)].mod_revision if keys.host_spec(name) in found else 0),
        not_ready=status.not_ready if status is not None else "",
        preemption=status.preemption if status is not None else None,
        preemption_pending=state is not None and state.preemption_pending and decided,
        preemption_problem=status.preemption_problem if status is not None else "",
        services=status.services if status is not None else {}, assignments=dict(assigned), unreadable=unreadable)


def page(etcd: EtcdClient, keys: ClusterKeys, limit: int, after: str = "") -> tuple[list[HostView], bool]:
    """At most ``limit`` hosts after the one named ``after``, by name, and whether there are more, as of one revision.
    Raises EtcdUnavailable."""
    leader_s = _leader_s(etcd.get(keys.leader_clock()))
    found, names, revision = dict[str, KeyValue](), set[str](), 0

    def read(prefix: str, *, until: str = "", most: int = 0) -> Iterator[KeyValue]:
        """Keys of the range that belong to hosts after ``after``, up to the host ``until``."""
        nonlocal revision
        for part in etcd.pages(prefix, after=prefix + after if after else "", before=f"{prefix}{until}\0" if until else
                               "", limit=most, revision=revision):
            revision = part.revision
            yield from part.kvs

    # A host may be under one of these only: not decided about, no longer registered, of a restored etcd.
    for prefix in (keys.hosts_prefix(), keys.host_registrations_prefix(), keys.host_states_prefix()):
        for kv in read(prefix, most=limit + 1):
            found[kv.key] = kv
            names.add(kv.key.removeprefix(prefix))
    shown = sorted(names)[:limit]
    if not shown:
        return [], False
    for prefix in (keys.host_statuses_prefix(), keys.host_specs_prefix()):
        found.update((kv.key, kv) for kv in read(prefix, until=shown[-1]))
    assigned = _assigned(keys, etcd.range(keys.assignments_prefix(), revision=revision)[0])
    views = (view(keys, name, found, assigned.get(name, {}), leader_s) for name in shown)
    return [each for each in views if each is not None], len(names) > limit


class HostReading(NamedTuple):
    """A host, and what it was read from."""

    host: HostView
    found: TxnResult
    """The transaction that has read the keys of the host."""
    unreadable: dict[str, str]
    """Assignments that this release cannot read, by key, and why: any may be of this host."""


def get_host(etcd: EtcdClient, keys: ClusterKeys, name: str) -> HostView:
    """One host, as of one revision. Raises a 404 problem, and EtcdUnavailable."""
    return read_host(etcd, keys, name).host


def read_host(etcd: EtcdClient, keys: ClusterKeys, name: str) -> HostReading:
    """One host, as of the revision of what was found. Raises a 404 problem, and EtcdUnavailable."""
    clock = keys.leader_clock()
    of_host = (keys.host(name), keys.host_registration(name), keys.host_state(name), keys.host_status(name),
               keys.host_spec(name))
    read = etcd.txn([], [Op.get(key) for key in (clock, *of_host)])
    found = {kv.key: kv for kv in read.kvs}
    assignments, unreadable = etcd.range(keys.assignments_prefix(), revision=read.revision)[0], dict[str, str]()
    assigned = _assigned(keys, assignments, unreadable).get(name, {})
    shown = view(keys, name, found, assigned, _leader_s(found.get(clock)))
    if shown is None:
        raise not_found("host", name)
    return HostReading(shown, read, unreadable)


def _assigned(keys: ClusterKeys, kvs: Iterable[KeyValue], unreadable: dict[str, str] | None = None
              ) -> Mapping[str, dict[str, HostAssignment]]:
    """The singletons of each host by name. One whose record cannot be read is left out, and logged; ``unreadable`` gets
    why, by key."""
    found: defaultdict[str, dict[str, HostAssignment]] = defaultdict(dict)
    for record, kv in readable(kvs, Assignment, unreadable):
        if record.host:
            found[record.host][kv.key.removeprefix(keys.assignments_prefix())] = HostAssignment(
                generation=kv.version, incarnation=record.incarnation, reason=record.reason)
    return found


def _leader_s(clock: KeyValue | None) -> float | None:
    time = readable_one(clock, LeaderTime)
    return time.seconds if time is not None else None
