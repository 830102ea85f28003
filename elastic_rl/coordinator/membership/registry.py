"""Who was seen, so that who died is noticed: by this leader or, when the leader died too, by the next one.

Each member that the leader sees gets a record here, outside any lease. A member that is in the roster and no longer
registered has died. A clean close deletes the member's key and its roster key in one transaction, so that it is never
taken for a death. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from elastic_rl.etcd.records import DcsNode, Member, Record

DCS = "dcs"
COORDINATOR = "coordinator"
TRAINER = "trainer"
ENGINE = "engine"
CLOSED = "closed"
"""Phase of a member that says good-bye."""
DURABLE = (COORDINATOR, DCS)
"""Roles of the durable plane: a member has an identity that returns. Elsewhere a replacement may have another name."""


class LastSeen(Record):
    """What the leader last knew of a member. ``first_seen`` and ``dead_at`` are unix seconds."""

    role: str
    id: str
    incarnation: str
    epoch: int = 0
    pid: int = 0
    host: str = ""
    first_seen: float
    dead_at: float = 0.0
    hung_at: float = 0.0
    """Unix seconds at which it was found to beat without working; 0 while it works."""
    reported: bool = False
    """Somebody else's event told of the death before the lease ended."""

    @property
    def name(self) -> tuple[str, str]:
        return self.role, self.id

    @property
    def dead(self) -> bool:
        return self.dead_at > 0


@dataclass(frozen=True)
class LiveMember:
    """A registered member, and the create revision of its key: another one means that it registered anew."""

    role: str
    id: str
    incarnation: str
    epoch: int
    pid: int
    host: str
    key: str
    create_revision: int
    closed: bool = False
    hung: bool = False
    doing: str = ""
    """Step and phase, for people."""

    @property
    def name(self) -> tuple[str, str]:
        return self.role, self.id


class Change(StrEnum):
    SEEN = "seen"
    """A member is new."""
    DIED = "died"
    RETURNED = "returned"
    HUNG = "hung"
    """It beats and does not work."""
    RESUMED = "resumed"
    """It was hung and works again."""
    REPLACED = "replaced"
    """It had died, and another one does its work now."""
    FORGET = "forget"
    """Its death is no news: it said good-bye, or its run is over."""


@dataclass(frozen=True)
class Step:
    change: Change
    sighting: LastSeen
    """The record as it shall be (for REPLACED and FORGET: as it is)."""
    living: LiveMember | None = None


def of_member(member: Member, key: str, create_revision: int, *, hung: bool = False) -> LiveMember:
    return LiveMember(member.role, member.id, member.incarnation or str(member.pid), member.epoch, member.pid,
                      member.host,
                  key, create_revision, closed=member.phase == CLOSED, hung=hung,
                  doing=f"step {member.step}, {member.phase}")


def of_node(node: DcsNode, key: str, create_revision: int) -> LiveMember:
    return LiveMember(DCS, node.id, f"{node.pid}:{node.port}", 0, node.pid, node.host, key, create_revision)


def step(now: float, roster: Mapping[tuple[str, str], LastSeen], living: Mapping[tuple[str, str], LiveMember], *,
         epoch: int, run_over: bool, coordinators: int, ended_epoch: int = 0) -> list[Step]:
    """Compares the roster with who is registered.

    ``epoch``: the run's; members of an older one were ended on purpose. ``run_over``: the job finished or failed, so
    the compute plane goes away on purpose. ``coordinators``: replicas that are wanted; with that many alive a dead one
    is no longer missed. ``ended_epoch``: epochs up to this one were ended by a global restart, drivers and all.
    """
    steps = []
    for name, member in living.items():
        known = roster.get(name)
        if member.closed:
            if known is not None:
                steps.append(Step(Change.FORGET, known, member))
        elif known is None:
            steps.append(Step(Change.SEEN, _seen(now, member), member))
        elif known.dead:
            # A reported death of the same incarnation: its process still says good-bye, it is no return.
            if not (known.reported and known.incarnation == member.incarnation):
                steps.append(Step(Change.RETURNED, _seen(now, member), member))
        elif known.incarnation != member.incarnation:
            steps.append(Step(Change.DIED, known.replace(dead_at=now), member))
        elif member.hung and not known.hung_at:
            steps.append(Step(Change.HUNG, known.replace(hung_at=now), member))
        elif known.hung_at and not member.hung:
            steps.append(Step(Change.RESUMED, known.replace(hung_at=0.0), member))
    alive = {name: s for name, s in roster.items() if not s.dead and name in living}
    for name, known in roster.items():
        if name in living:
            continue
        if _expected(known, epoch=epoch, run_over=run_over, ended_epoch=ended_epoch):
            steps.append(Step(Change.FORGET, known))
        elif known.dead and _replaced(known, alive, coordinators):
            steps.append(Step(Change.REPLACED, known))
        elif not known.dead:
            steps.append(Step(Change.DIED, known.replace(dead_at=now)))
    return steps


def _seen(now: float, m: LiveMember) -> LastSeen:
    return LastSeen(role=m.role, id=m.id, incarnation=m.incarnation, epoch=m.epoch, pid=m.pid, host=m.host,
                    first_seen=now)


def _expected(known: LastSeen, *, epoch: int, run_over: bool, ended_epoch: int) -> bool:
    if known.role in DURABLE:
        return False
    # The driver of an old epoch is replaced *because* it died, so its death stays news, unless it was ended on purpose.
    over = ended_epoch + 1 if known.role == "driver" else epoch
    return run_over or 0 < known.epoch < over


def _replaced(known: LastSeen, alive: Mapping[tuple[str, str], LastSeen], coordinators: int) -> bool:
    peers = [s for s in alive.values() if s.role == known.role]
    if known.role == DCS:
        return False
    if known.role == COORDINATOR:
        return len(peers) >= coordinators
    if known.role == TRAINER:
        # The group forms anew as a whole, perhaps smaller; its rank 0 tells that it did.
        peers = [s for s in peers if s.id == "rank-0"]
    return any(s.first_seen > known.dead_at for s in peers)


def missing(roster: Iterable[LastSeen]) -> list[LastSeen]:
    """Members that are dead and not replaced."""
    return [s for s in roster if s.dead]
