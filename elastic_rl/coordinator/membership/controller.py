"""The leader's part of membership: writes down which members came, are suspected, died, hang, resumed or were replaced,
each together with its event, with what the failure policy records of it and, for an engine that died, with the end of
its record."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from elastic_rl.config import Config
from elastic_rl.config.groups import TRAINER_GROUPS
from elastic_rl.coordinator.membership import hang_detection, registry
from elastic_rl.coordinator.membership.hang_detection import HangLimits, IntervalLearner
from elastic_rl.coordinator.membership.registry import BY_LEADER, LastHeartbeat, LiveMember, MemberChange, Transition
from elastic_rl.coordinator.membership.suspicion import Suspicion, WitnessReports
from elastic_rl.coordinator.membership.weight_outliers import outliers
from elastic_rl.coordinator.records import LastSeen, ProgressIntervals
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.coordinator.write_set import WriteSet
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.decoding import decode, decode_all
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import EngineState, Event, Member, Severity
from elastic_rl.etcd.transaction import MAX_OPS, GuardedWrite, batches

log = logging.getLogger(__name__)

_VERBS = {Transition.DIED: "died", Transition.HUNG: "sends heartbeats but makes no progress",
          Transition.RESUMED: "makes progress again", Transition.SUSPECTED: "sends no heartbeats; it may be slow",
          Transition.ALIVE: "sends heartbeats again", Transition.LATE: "is late"}
"""What the message of the change's event says."""
_FAULTS = (Transition.DIED, Transition.HUNG)
_STALLED = (Transition.HUNG, Transition.LATE)
_WITHOUT_EVENT = (Transition.SEEN, Transition.FORGOTTEN, Transition.ON_TIME)
"""Changes without an event. Thousands come at once when a run starts or ends, and share transactions."""
_WITHOUT_EVENT_BATCH = MAX_OPS // 2
"""Changes in one transaction, each with two comparisons at most: of the member's key and of its registry entry."""
_SUSPICION = (Transition.SUSPECTED, Transition.ALIVE, Transition.LATE)
"""They say little about one member, and nothing when they come by the hundred: etcd or a network was away for a while.
"""
_MAX_SUSPICION_EVENTS = 50
"""Suspicions beyond this number in one pass are written without events."""
_MAX_WITHOUT_EVENT, _MAX_WITH_EVENT = 4000, 400
"""Changes that one pass writes; the next pass writes the others. A pass must end well within its deadline."""
_REPORT_RECOVERY = (event_kinds.ENGINE, *TRAINER_GROUPS)
"""Roles whose own events say that a replacement works."""


class FaultRecorder(Protocol):
    """Adds what the failure policy has to remember of a fault to the transaction that makes the fault known."""

    def __call__(self, member: LastSeen, change: Transition, snapshot: ClusterSnapshot, writes: WriteSet) -> None: ...


class MembershipController:
    def __init__(self, etcd: EtcdClient, keys: Keys, cfg: Config, record_fault: FaultRecorder,
                 guarded: GuardedWrite) -> None:
        self._etcd, self._keys, self._cfg = etcd, keys, cfg
        self._record_fault, self._guarded = record_fault, guarded
        self._limits, self._learner = HangLimits.from_config(cfg.coordinator), IntervalLearner({})
        self._suspicion = Suspicion.from_config(cfg.coordinator)
        self._heartbeats: dict[tuple[str, str, str], LastHeartbeat] = {}
        self._known: dict[tuple[str, str], tuple[Member, LiveMember]] = {}
        """The members of the last snapshot: the next one has the same objects of those that have not changed."""

    def begin_term(self) -> None:
        """Reads the progress intervals that earlier leaders learned. Raises EtcdUnavailable."""
        kvs, _ = self._etcd.range(self._keys.progress_intervals_prefix())
        self._learner = IntervalLearner({i.role: i for i, _ in decode_all(kvs, ProgressIntervals, {})})

    def update(self, snapshot: ClusterSnapshot) -> bool:
        """Brings the registry up to date; returns whether anything was written. Raises Fenced."""
        self._learn(snapshot)
        reports = WitnessReports(snapshot.leader_time, snapshot.witnesses, snapshot.evidence)
        live = self._live(snapshot, reports.loads)
        changes = registry.compare(
            snapshot.registry, live, now=snapshot.now, revision=snapshot.read_at,
            last_heartbeats=self._heartbeats, epoch=snapshot.epoch, run_over=snapshot.run_ended,
            ended_epoch=snapshot.ended_epoch, coordinators=self._cfg.coordinator.replicas,
            reports=reports, suspicion=self._suspicion)
        quiet: tuple[Transition, ...] = _WITHOUT_EVENT
        if sum(c.change in _SUSPICION for c in changes) > _MAX_SUSPICION_EVENTS:
            quiet += _SUSPICION
        without_event = [c for c in changes if c.change in quiet][:_MAX_WITHOUT_EVENT]
        for batch in batches(without_event, _WITHOUT_EVENT_BATCH):
            self._write_together(snapshot, batch)
        for change in [c for c in changes if c.change not in quiet][:_MAX_WITH_EVENT]:
            self._write(snapshot, change)
        return bool(changes)

    def quarantine_outliers(self, snapshot: ClusterSnapshot) -> bool:
        """Quarantines engines whose weights differ from those of the others; their runners obey the record. Returns
        whether there was one. Raises Fenced."""
        found = outliers(snapshot.engines.values())
        for engine in found:
            reason = f"its weights of version {engine.version} differ from those of the other engines"
            quarantined = engine.replace(state=EngineState.QUARANTINED, reason=reason, updated_at=snapshot.now)
            event = events.build(event_kinds.ENGINE_QUARANTINED, engine.id, f"engine {engine.id}: {reason}",
                                 severity=Severity.ERROR, by=BY_LEADER, version=engine.version)
            key = self._keys.engine(engine.id)
            self._guarded([snapshot.unchanged(key)],
                          [Op.put(key, quarantined.encode()), events.put_op(self._keys, event)])
        return bool(found)

    def mark_reported(self, role: str, member_id: str, incarnation: str, now: float, revision: int) -> None:
        """Another process reported the death of an incarnation at ``revision``, before its lease ended: it is then not
        reported twice. A report about another incarnation than the one that is registered is late, and changes nothing.
        """
        key = self._keys.registry_entry(role, member_id)
        found = self._etcd.get(key)
        entry = decode(found, LastSeen, {}) if found else None
        if found and entry and not entry.dead and entry.incarnation == incarnation:
            self._guarded([Compare.mod(key, "==", found.mod_revision)],
                          [Op.put(key, entry.replace(dead_at=now, dead_revision=revision, reported=True).encode())])

    # -- reading ------------------------------------------------------------------------------------------------
    def _learn(self, snapshot: ClusterSnapshot) -> None:
        if len(self._heartbeats) > 2 * len(snapshot.registry):
            entries = {(s.role, s.id, s.incarnation) for s in snapshot.registry.values()}
            self._heartbeats = {who: h for who, h in self._heartbeats.items() if who in entries}
        for intervals in self._learner.observe(snapshot.members):
            self._guarded([], [Op.put(self._keys.progress_intervals(intervals.role), intervals.encode())])

    def _live(self, snapshot: ClusterSnapshot, loads: Mapping[str, float]) -> dict[tuple[str, str], LiveMember]:
        """``loads``: per core, by machine."""
        before, self._known = self._known, {}
        for m in snapshot.members:
            known = before.get((m.role, m.id))
            if known is None or known[0] is not m:
                known = m, self._live_member(snapshot, m, loads.get(m.machine, 0.0))
            self._known[m.role, m.id] = known
        live = {name: member for name, (_, member) in self._known.items()}
        for node in snapshot.nodes.values():
            key = self._keys.dcs_node(node.id)
            live[registry.DCS, node.id] = registry.live_node(node, key, snapshot.created(key))
        return live

    def _live_member(self, snapshot: ClusterSnapshot, m: Member, load_per_core: float) -> LiveMember:
        """A member that has changed since the last snapshot."""
        key = self._keys.member(m.role, m.id)
        if m.beat_at:
            who = m.role, m.id, m.incarnation
            before = self._heartbeats.get(who)
            # Not the revision at which its agent has written: the member may have died, and been replaced, between the
            # heartbeat and that. None that etcd has not reached, as it may be when etcd was restored.
            seen = (snapshot.alive_revisions.get(m.incarnation, 0), before.revision if before is not None else 0)
            alive = max([snapshot.revision(key), *(r for r in seen if r <= snapshot.read_at)])
            self._heartbeats[who] = LastHeartbeat(m.beat_at, alive)
        pace = hang_detection.pace(m, self._learner.intervals, self._limits, load_per_core)
        return registry.live_member(m, key, snapshot.created(key), hung=pace.hung, late=pace.late)

    # -- writing ------------------------------------------------------------------------------------------------
    def _write_together(self, snapshot: ClusterSnapshot, changes: Sequence[MemberChange]) -> None:
        """Writes changes without events in one transaction, or one by one if one of them is out of date."""
        together = WriteSet()
        for change in changes:
            together.merge(self._draft(snapshot, change, with_event=False))
        if not self._guarded(together.compares, together.ops):
            for change in changes:
                self._write(snapshot, change)

    def _write(self, snapshot: ClusterSnapshot, change: MemberChange) -> None:
        writes = self._draft(snapshot, change)
        if self._guarded(writes.compares, writes.ops) and change.change in _VERBS:
            log.log(logging.WARNING if change.change in _FAULTS else logging.INFO, "%s %s %s%s", *change.entry.name,
                    _VERBS[change.change], f": {change.why}" if change.why else "")

    def _draft(self, snapshot: ClusterSnapshot, change: MemberChange, *, with_event: bool = True) -> WriteSet:
        entry, live, writes = change.entry, change.live, WriteSet()
        key = self._keys.registry_entry(*entry.name)
        # A member that closed, or registered, since it was read must not get the fate of the one that was read.
        writes.require(Compare.create(live.key, "==", live.create_revision) if live is not None else
                       Compare.absent(self._keys.registration(*entry.name)))
        if change.change in (Transition.FORGOTTEN, Transition.REPLACED):
            writes.delete(key, snapshot.revision(key))
            writes.add(Op.delete(self._keys.evidence(*entry.name)))
        else:
            writes.put(key, snapshot.revision(key), entry)
        match change.change:
            case Transition.REPLACED if entry.role not in _REPORT_RECOVERY:
                writes.add(events.put_op(self._keys, _recovered(entry)))
            case Transition.RETURNED:
                writes.add(events.put_op(self._keys, _returned(entry)))
            case Transition.DIED | Transition.HUNG:
                writes.add(events.put_op(self._keys, self._fault_event(snapshot, change)))
                self._record_fault(entry, change.change, snapshot, writes)
                if change.change is Transition.DIED:
                    self._end_engine(snapshot, entry, writes)
            case Transition.RESUMED | Transition.SUSPECTED | Transition.ALIVE | Transition.LATE if with_event:
                writes.add(events.put_op(self._keys, self._fault_event(snapshot, change)))
        return writes

    def _fault_event(self, snapshot: ClusterSnapshot, change: MemberChange) -> Event:
        entry = change.entry
        who = f"{entry.role} {entry.id} (pid {entry.pid} on {entry.host})"
        doing = f" in {change.live.doing}" if change.live and change.change in _STALLED else ""
        why = f": {change.why}" if change.why else ""
        return events.build(
            _kind(change), entry.id, f"{who} {_VERBS[change.change]}{doing}{why}",
            severity=Severity.ERROR if change.change in _FAULTS else Severity.INFO, by=BY_LEADER, pid=entry.pid,
            incarnation=entry.incarnation, **self._detection_time(snapshot, change))

    def _detection_time(self, snapshot: ClusterSnapshot, change: MemberChange) -> dict[str, float]:
        """Seconds since the member's last heartbeat or progress; empty where that is not known."""
        entry, last = change.entry, 0.0
        if change.change is Transition.HUNG:
            last = next((m.progress_at for m in snapshot.members if (m.role, m.id) == entry.name), 0.0)
        elif change.change is Transition.DIED:
            heartbeat = self._heartbeats.get((entry.role, entry.id, entry.incarnation))
            last = heartbeat.at if heartbeat else 0.0
        return {"detect_s": round(max(0.0, snapshot.now - last), 3)} if last else {}

    def _end_engine(self, snapshot: ClusterSnapshot, dead: LastSeen, writes: WriteSet) -> None:
        """Ends the record of a dead engine; its driver then replaces it."""
        engine = snapshot.engines.get(dead.id) if dead.role == event_kinds.ENGINE else None
        if engine is None or engine.state is EngineState.DEAD:
            return
        if engine.incarnation and engine.incarnation != dead.incarnation:  # another runner has taken the id over
            return
        key = self._keys.engine(engine.id)
        writes.put(key, snapshot.revision(key), engine.replace(
            state=EngineState.DEAD, reason="its process died", updated_at=snapshot.now))


def _kind(change: MemberChange) -> EventKind:
    kinds = event_kinds.of_members(change.entry.role)
    return {Transition.DIED: kinds.dead, Transition.HUNG: kinds.hung, Transition.RESUMED: kinds.resumed,
            Transition.SUSPECTED: kinds.suspected, Transition.ALIVE: kinds.alive,
            Transition.LATE: kinds.late}[change.change]


def _recovered(s: LastSeen) -> Event:
    return events.build(event_kinds.of_members(s.role).recovered, s.id,
                        f"another {s.role} has taken over from {s.id}", by=BY_LEADER)


def _returned(s: LastSeen) -> Event:
    return events.build(event_kinds.of_members(s.role).returned, s.id,
                        f"{s.role} {s.id} is back (pid {s.pid} on {s.host})", by=BY_LEADER,
                        pid=s.pid, incarnation=s.incarnation)
