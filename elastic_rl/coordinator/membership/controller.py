"""The leader's part of membership: writes down who came, died, hangs, works again or was replaced, each together with
its event, with what the failure policy notes of it and, for an engine that died, with the end of its record."""

from __future__ import annotations

import logging

from elastic_rl.config import Config
from elastic_rl.coordinator.alerts import rules
from elastic_rl.coordinator.failure.controller import FailureController, Writes
from elastic_rl.coordinator.failure.policy import Fault
from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.membership.registry import Change, LastSeen
from elastic_rl.coordinator.membership.weight_outliers import outliers
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.etcd import events
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import EngineState, Event, Severity
from elastic_rl.etcd.transaction import GuardedWrite

log = logging.getLogger(__name__)

_FAULTS = {Change.DIED: Fault.DEAD, Change.HUNG: Fault.HUNG}
_TOLD = {Change.DIED: ("dead", "died"), Change.HUNG: ("hung", "beats but does not work"),
         Change.RESUMED: ("resumed", "works again")}
"""Kind of the event and words of its message."""
_TELL_THEMSELVES = (registry.ENGINE, registry.TRAINER)
"""Roles whose own events say that a replacement works."""


class MembershipController:
    def __init__(self, etcd: EtcdClient, keys: Keys, cfg: Config, failures: FailureController,
                 guarded: GuardedWrite) -> None:
        self._etcd, self._keys, self._cfg = etcd, keys, cfg
        self._failures, self._guarded = failures, guarded
        self._beats: dict[tuple[str, str, str], float] = {}  # heartbeats that this leader saw; only to measure by

    def update(self, look: ClusterSnapshot) -> bool:
        """Brings the roster up to date; whether there was anything to write. Raises Fenced."""
        self._note_beats(look)
        steps = registry.step(look.now, {name: s for name, (s, _) in look.roster.items()}, look.living,
                            epoch=look.epoch, run_over=look.world.run_over, ended_epoch=look.ended_epoch,
                            coordinators=self._cfg.coordinator.replicas)
        for step in steps:
            self._write(look, step)
        return bool(steps)

    def expel_outliers(self, look: ClusterSnapshot) -> bool:
        """Takes engines out whose weights differ from those of the others; their runners obey the record. Whether there
        was one."""
        found = outliers(look.world.engines)
        for engine in found:
            reason = f"its weights of version {engine.version} differ from those of the other engines"
            gone = engine.replace(state=EngineState.QUARANTINED, reason=reason, updated_at=look.now)
            event = events.build("engine.quarantined", engine.id, f"engine {engine.id}: {reason}",
                                 severity=Severity.ERROR, by=rules.BY_LEADER, version=engine.version)
            key = self._keys.engine(engine.id)
            self._guarded([Compare.mod(key, "==", look.engines[engine.id][1])],
                          [Op.put(key, gone.encode()), events.put_op(self._keys, event)])
        return bool(found)

    def mark_reported(self, role: str, member_id: str, now: float) -> None:
        """Somebody else's event told of a death before the lease ended: the death is then told no second time."""
        key = self._keys.roster(role, member_id)
        found = self._etcd.get(key)
        known = LastSeen.decode(found.value) if found else None
        if found and known and not known.dead:
            self._guarded([Compare.mod(key, "==", found.mod_revision)],
                          [Op.put(key, known.replace(dead_at=now, reported=True).encode())])

    def _note_beats(self, look: ClusterSnapshot) -> None:
        seen = {(s.role, s.id, s.incarnation) for s, _ in look.roster.values()}
        self._beats = {who: at for who, at in self._beats.items() if who in seen}
        self._beats |= {(m.role, m.id, m.incarnation): m.beat_at for m in look.members if m.beat_at}

    def _write(self, look: ClusterSnapshot, step: registry.Step) -> None:
        who = step.sighting
        key = self._keys.roster(*who.name)
        compares = [Compare.mod(key, "==", look.roster[who.name][1] if who.name in look.roster else 0)]
        ops = [Op.put(key, who.encode())]
        match step.change:
            case Change.FORGET | Change.REPLACED:
                ops = [Op.delete(key)]
                if step.living is not None:
                    ops.append(Op.delete(step.living.key))
                if step.change is Change.REPLACED and who.role not in _TELL_THEMSELVES:
                    ops.append(events.put_op(self._keys, _recovered(who)))
            case Change.SEEN | Change.RETURNED:
                assert step.living is not None
                # A member that closed since it was read must not come back into the roster.
                compares.append(Compare.create(step.living.key, "==", step.living.create_revision))
                if step.change is Change.RETURNED:
                    ops.append(events.put_op(self._keys, _returned(who)))
            case Change.DIED | Change.HUNG | Change.RESUMED:
                told = self._told(look, step)
                compares += told[0]
                ops += told[1]
        if self._guarded(compares, ops) and step.change in _FAULTS:
            log.warning("%s %s is %s", *who.name, step.change)

    def _told(self, look: ClusterSnapshot, step: registry.Step) -> Writes:
        """What goes with a fault or its end."""
        who = step.sighting
        kind, words = _TOLD[step.change]
        doing = f" in {step.living.doing}" if step.living and step.change is Change.HUNG else ""
        event = events.build(f"{who.role}.{kind}", who.id, f"{who.role} {who.id} (pid {who.pid} on {who.host}) {words}"
                             f"{doing}", severity=Severity.INFO if step.change is Change.RESUMED else Severity.ERROR,
                             by=rules.BY_LEADER, pid=who.pid, incarnation=who.incarnation,
                             **self._noticed(look, step))
        compares: list[Compare] = []
        ops = [events.put_op(self._keys, event)]
        if step.change in _FAULTS:
            noted = self._failures.note(who, _FAULTS[step.change], look.now, look.world.status)
            compares, ops = [*compares, *noted[0]], [*ops, *noted[1]]
        if step.change is Change.DIED:
            ended = self._ended_engine(look, who)
            compares, ops = [*compares, *ended[0]], [*ops, *ended[1]]
        return compares, ops

    def _noticed(self, look: ClusterSnapshot, step: registry.Step) -> dict[str, float]:
        """Seconds since a part's last sign of life, for the measurement of faults; nothing where it is not known."""
        who = step.sighting
        if step.change is Change.HUNG:
            last = next((m.progress_at for m in look.members if (m.role, m.id) == who.name), None)
        else:
            last = self._beats.get((who.role, who.id, who.incarnation)) if step.change is Change.DIED else None
        return {"detect_s": round(max(0.0, look.now - last), 3)} if last else {}

    def _ended_engine(self, look: ClusterSnapshot, dead: LastSeen) -> Writes:
        """The end of a dead engine's record; its driver then replaces it."""
        engine, revision = look.engines.get(dead.id, (None, 0)) if dead.role == registry.ENGINE else (None, 0)
        if engine is None or engine.state is EngineState.DEAD:
            return [], []
        key = self._keys.engine(engine.id)
        gone = engine.replace(state=EngineState.DEAD, reason="its process died", updated_at=look.now)
        return [Compare.mod(key, "==", revision)], [Op.put(key, gone.encode())]


def _recovered(s: LastSeen) -> Event:
    return events.build(f"{s.role}.recovered", s.id, f"another {s.role} does the work of {s.id}",
                        by=rules.BY_LEADER)


def _returned(s: LastSeen) -> Event:
    return events.build(f"{s.role}.returned", s.id, f"{s.role} {s.id} is back (pid {s.pid} on {s.host})",
                        by=rules.BY_LEADER, pid=s.pid, incarnation=s.incarnation)
