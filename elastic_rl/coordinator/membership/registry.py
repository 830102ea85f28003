"""The member registry: which members were seen, so that a death is noticed, by this leader or by its successor.

Each member that the leader sees gets an entry here, outside any lease. A member with an entry that is no longer
registered is suspected, and has died as soon as ``suspicion`` finds a reason to say so. A clean close deletes the
member's key and its entry in one transaction, so that it is never taken for a death. Pure.

What came before what is decided by etcd's revisions, never by clocks: the entry may be another leader's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from elastic_rl.config.groups import TRAINER_GROUPS
from elastic_rl.coordinator.membership.suspicion import Suspicion, WitnessReports
from elastic_rl.coordinator.records import COORDINATOR, LastSeen
from elastic_rl.etcd.records import DcsNode, Member

DCS = "dcs"
DRIVER = "driver"
BY_LEADER = "leader"
"""``data["by"]`` of events that the leader made from the registry, whose alert the registry opens already."""
DURABLE = (COORDINATOR, DCS)
"""Roles of the durable plane: a member restarts under its own id. Elsewhere a replacement may have another one."""


@dataclass(frozen=True)
class LiveMember:
    """A registered member. Another ``create_revision`` of its key means that it registered again."""

    role: str
    id: str
    incarnation: str
    epoch: int
    pid: int
    host: str
    key: str
    create_revision: int
    hung: bool = False
    late: str = ""
    """What is late about it, for people; empty while nothing is."""
    machine: str = ""
    doing: str = ""
    """Step and phase, for people."""

    @property
    def name(self) -> tuple[str, str]:
        return self.role, self.id


class LastHeartbeat(NamedTuple):
    """The last heartbeat that this leader saw of a member."""

    at: float
    """Unix seconds, by the member's clock."""
    revision: int
    """A revision of etcd at which the member still ran."""


class Transition(StrEnum):
    """What has become of a member."""

    SEEN = "seen"
    """A member is new."""
    SUSPECTED = "suspected"
    """It is no longer registered, and nothing says that its process has ended: it may be slow."""
    ALIVE = "alive"
    """It was suspected and is registered again: nothing has happened."""
    DIED = "died"
    RETURNED = "returned"
    HUNG = "hung"
    """It sends heartbeats and makes no progress."""
    RESUMED = "resumed"
    """It was hung and makes progress again."""
    LATE = "late"
    """It takes much longer than was expected, and may hang."""
    ON_TIME = "on_time"
    """It was late and makes progress again."""
    REPLACED = "replaced"
    """It had died, and another member does its work now."""
    FORGOTTEN = "forgotten"
    """The member's end is expected: its epoch or its run is over."""


@dataclass(frozen=True)
class MemberChange:
    change: Transition
    entry: LastSeen
    """The entry as it is to be written (REPLACED and FORGOTTEN: as it is, to be deleted)."""
    live: LiveMember | None = None
    why: str = ""
    """The reason of DIED and of LATE, for people."""


def member_incarnation(member: Member) -> str:
    """What tells the process of a member from others of its name."""
    return member.incarnation or str(member.pid)


def live_member(member: Member, key: str, create_revision: int, *, hung: bool = False, late: str = "") -> LiveMember:
    return LiveMember(member.role, member.id, member_incarnation(member), member.epoch, member.pid,
                      member.host, key, create_revision, hung=hung, late=late, machine=member.machine,
                      doing=f"step {member.step}, {member.phase}")


def live_node(node: DcsNode, key: str, create_revision: int) -> LiveMember:
    return LiveMember(DCS, node.id, node.process, 0, node.pid, node.host, key, create_revision,
                      machine=node.machine)


def compare(registry: Mapping[tuple[str, str], LastSeen], live: Mapping[tuple[str, str], LiveMember], *, now: float,
            revision: int, last_heartbeats: Mapping[tuple[str, str, str], LastHeartbeat], epoch: int, run_over: bool,
            coordinators: int, reports: WitnessReports, suspicion: Suspicion, ended_epoch: int = 0
            ) -> list[MemberChange]:
    """Compares the registry with who is registered.

    ``now``: unix seconds, only for people. ``revision``: the revision of etcd, at which ``live`` was read.
    ``last_heartbeats``: by role, id and incarnation. ``epoch``: the run's; members of an older one were ended on
    purpose. ``run_over``: the job finished or failed, or was stopped, so the compute plane ends on purpose.
    ``coordinators``: configured replicas; with that many alive a dead one is replaced. ``ended_epoch``: epochs up to
    this one were ended by a global restart, drivers included.
    """

    def silent(entry: LastSeen, **changes: float) -> LastSeen:
        if entry.suspected:  # what registered meanwhile may be its replacement
            return entry.replace(**changes)
        last = last_heartbeats.get((entry.role, entry.id, entry.incarnation))
        return entry.replace(dead_revision=last.revision if last else revision, **changes)

    changes = []
    for name, member in live.items():
        entry = registry.get(name)
        if entry is None:
            changes.append(MemberChange(Transition.SEEN, _seen(now, member), member))
        elif entry.dead:
            # A reported death of the same incarnation: its process has not deregistered yet; it has not returned.
            if not (entry.reported and entry.incarnation == member.incarnation):
                changes.append(MemberChange(Transition.RETURNED, _seen(now, member), member))
        elif entry.incarnation != member.incarnation:
            changes.append(MemberChange(Transition.DIED, silent(entry, dead_at=now), member,
                                        "another process has its name"))
        elif entry.suspected:
            changes.append(MemberChange(Transition.ALIVE, entry.replace(suspected_at=0.0, suspected_leader_s=0.0,
                                                                    dead_revision=0), member))
        elif member.hung and not entry.hung_at:
            changes.append(MemberChange(Transition.HUNG, entry.replace(
                hung_at=now, late_at=entry.late_at or now), member))
        elif entry.hung_at and not member.hung:
            changes.append(MemberChange(Transition.RESUMED, entry.replace(hung_at=0.0), member))
        elif member.late and not entry.late_at:
            changes.append(MemberChange(Transition.LATE, entry.replace(late_at=now), member, member.late))
        elif entry.late_at and not member.late:
            changes.append(MemberChange(Transition.ON_TIME, entry.replace(late_at=0.0), member))
    peers = _Peers(live.values())
    for name, entry in registry.items():
        if name in live:
            continue
        if end_expected(entry, epoch=epoch, run_over=run_over, ended_epoch=ended_epoch):
            changes.append(MemberChange(Transition.FORGOTTEN, entry))
        elif entry.dead and peers.replace(entry, coordinators):
            changes.append(MemberChange(Transition.REPLACED, entry))
        elif entry.dead:
            continue
        elif why := suspicion.why_dead(entry, reports):
            changes.append(MemberChange(Transition.DIED, silent(entry, dead_at=now), why=why))
        elif not entry.suspected:
            changes.append(MemberChange(Transition.SUSPECTED, silent(
                entry, suspected_at=now, suspected_leader_s=reports.leader_s)))
    return changes


def _seen(now: float, m: LiveMember) -> LastSeen:
    return LastSeen(role=m.role, id=m.id, incarnation=m.incarnation, epoch=m.epoch, pid=m.pid, host=m.host,
                    machine=m.machine, first_seen=now, registered_revision=m.create_revision)


def end_expected(entry: LastSeen, *, epoch: int, run_over: bool, ended_epoch: int) -> bool:
    """Whether a member is ended on purpose, since its epoch or its run is over. See ``compare`` for the arguments."""
    if entry.role in DURABLE:
        return False
    # The end of a driver may be why the next one has begun a new epoch, so its death counts. A global restart on
    # request has ended it on purpose.
    over = ended_epoch + 1 if entry.role == DRIVER else epoch
    return run_over or 0 < entry.epoch < over


class _Peers:
    """Live members, summed up by role."""

    def __init__(self, live: Iterable[LiveMember]) -> None:
        self._count: Counter[str] = Counter()
        self._newest: dict[str, int] = {}
        for m in live:
            self._count[m.role] += 1
            # A trainer group forms again as a whole, perhaps smaller; its rank 0 stands for it.
            if m.role not in TRAINER_GROUPS or m.id == "rank-0":
                self._newest[m.role] = max(m.create_revision, self._newest.get(m.role, 0))

    def replace(self, entry: LastSeen, coordinators: int) -> bool:
        """Whether another member does the work of a dead one."""
        if entry.role == DCS:
            return False
        if entry.role == COORDINATOR:
            return self._count[COORDINATOR] >= coordinators
        if entry.role == DRIVER:  # one runs at a time, and the next one may have registered before the death was found
            return self._newest.get(DRIVER, 0) > entry.registered_revision
        return self._newest.get(entry.role, 0) > entry.dead_revision
