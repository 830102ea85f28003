"""The leader's loop: compares what is with what was seen and wanted, writes down what follows, and sends alerts.

Level-triggered: each look reads etcd by range, so a leader that takes over continues where the last one stopped. What
it writes goes through transactions under its fencing token, and a record changes together with its event, so that each
fault gives one event whatever dies in between. Nothing that matters is only in memory.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from elastic_rl.config import Config
from elastic_rl.coordinator import alert_rules, alerts, events, progress, roster
from elastic_rl.coordinator.absence import Absence
from elastic_rl.coordinator.alerting import Alerting
from elastic_rl.coordinator.curve import to_thin
from elastic_rl.coordinator.election import Election
from elastic_rl.coordinator.etcd_health import EtcdProbe
from elastic_rl.coordinator.failure_keeper import FailureKeeper, Writes
from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.notify import Notifier
from elastic_rl.coordinator.operation_desk import OperationDesk
from elastic_rl.coordinator.operation_keeper import OperationKeeper
from elastic_rl.coordinator.operations import JOB, View
from elastic_rl.coordinator.outcry import Outcry
from elastic_rl.coordinator.outliers import outliers
from elastic_rl.coordinator.policy import Fault, FaultLog
from elastic_rl.coordinator.progress import Learner, Limits, Pace
from elastic_rl.coordinator.records import (
    DcsNode,
    Engine,
    EngineState,
    Epoch,
    Event,
    JobStatus,
    Leader,
    Member,
    Operation,
    PoolSpec,
    PoolStatus,
    Record,
    Restart,
    Severity,
)
from elastic_rl.coordinator.roster import Change, Living, Sighting
from elastic_rl.coordinator.store import Compare, KeyValue, Op, Store
from elastic_rl.coordinator.tally import Cursor, count
from elastic_rl.errors import ElasticRLError, Fenced, StoreRefused
from elastic_rl.telemetry import metrics, traces

log = logging.getLogger(__name__)

_TRIM_EVERY_S = 15.0
_SWEEP_EVERY_S = 2.0
_TXN_OPS = 50
"""etcd takes at most 128 operations in a transaction; the client adds its own."""
_NEWEST = 64
_TELL_THEMSELVES = (roster.ENGINE, roster.TRAINER)
"""Roles whose own events say that a replacement works."""

_LOOK_S = metrics.histogram("reconcile_seconds", "Duration of one look of the leader")
_FAILED = metrics.counter("reconcile_failures", "Looks that ended with an error", ("error",))

_FAULTS = {Change.DIED: Fault.DEAD, Change.HUNG: Fault.HUNG}
_TOLD = {Change.DIED: ("dead", "died"), Change.HUNG: ("hung", "beats but does not work"),
         Change.RESUMED: ("resumed", "works again")}
"""Kind of the event and words of its message."""

Sweep = Callable[[Sequence[Compare]], list[str]]


class Leadership(Record):
    """The leadership that was announced last. ``term`` is the create revision of the leader's candidate key."""

    replica: str
    url: str
    pid: int
    term: int
    since: float


@dataclass(frozen=True)
class Look:
    """One reading of the store."""

    now: float
    world: alert_rules.World
    roster: dict[tuple[str, str], tuple[Sighting, int]]
    """Sightings with their mod revision."""
    living: dict[tuple[str, str], Living]
    engines: dict[str, tuple[Engine, int]]
    epoch: int
    members: list[Member]
    faults: dict[str, tuple[FaultLog, int]]
    restarts: dict[str, Restart]
    operations: dict[str, tuple[Operation, int]]

    @property
    def ended_epoch(self) -> int:
        """Epochs up to this one were ended by a global restart."""
        return self.restarts[JOB].epoch if JOB in self.restarts else 0


class Reconciler:
    """Runs ``look`` in a thread: after each interval, and at once when ``wake`` is called."""

    def __init__(self, store: Store, keys: Keys, cfg: Config, election: Election, notifier: Notifier, *,
                 sweep: Sweep | None = None, clock: Callable[[], float] = time.time) -> None:
        self._store, self._keys, self._cfg, self._election = store, keys, cfg, election
        self._sweep, self._clock = sweep, clock
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._due: dict[str, float] = {}
        desk = OperationDesk(store, keys, election, cfg, clock=clock)
        self._operations = OperationKeeper(keys, self._guarded)
        self._failures = FailureKeeper(store, keys, cfg.policy, desk, self._guarded)
        self._limits, self._learner, self._term = Limits.of(cfg.coordinator), Learner({}), 0
        self._beats: dict[tuple[str, str, str], float] = {}  # heartbeats that this leader saw; only to measure by
        self._probe, self._outcry = EtcdProbe(store, keys), Outcry(notifier)
        self._alerting = Alerting(store, keys, cfg, notifier, self._guarded, leads=lambda: election.is_leader,
                                  clock=clock, probe=self._probe)
        self._absence = Absence(store, keys, election, cfg.alerts.leaderless_s, self._guarded, clock)
        notifier.on_outcome(self.wake)
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)
        self.last_look = 0.0
        """Unix seconds of the last look that ended well."""

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout_s)
        self._probe.close()

    def _run(self) -> None:
        try:
            self._look_on()
        finally:
            if not self._stopping.is_set():
                # A leader that no longer looks is worse than none: it stops, with the traceback in its log.
                os.kill(os.getpid(), signal.SIGTERM)

    def _look_on(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._cfg.coordinator.reconcile_interval_s)
            self._wake.clear()
            if self._stopping.is_set() or not self._election.is_leader:
                continue
            try:
                with _LOOK_S.time(), traces.span("coordinator.reconcile"):
                    self.look()
                self.last_look = self._clock()
                self._outcry.over()
            except StoreRefused as e:
                _FAILED.labels(type(e).__name__).inc()
                log.error("look ended early: %s", e)
                self._outcry.tell(str(e))
            except ElasticRLError as e:  # the next look reads everything anew
                _FAILED.labels(type(e).__name__).inc()
                log.warning("look ended early: %s: %s", type(e).__name__, e)
            except ValidationError as e:  # a record that this release cannot read; a look without it would be wrong
                _FAILED.labels(type(e).__name__).inc()
                log.error("a record in the store is malformed: %s", e)
            self._stopping.wait(0.05)  # a burst of wake-ups is one look

    def look(self) -> None:
        """One look. Raises Fenced when the leadership is over, StoreUnavailable when etcd does not answer."""
        self._announce()
        self._absence.look()
        reports, over = self._read_events()
        look = self._read()
        self._update_roster(look)
        self._expel_outliers(look)
        look = self._read()
        self._failures.act(look.faults, look.now, look.world.status)
        self._follow_operations(look)
        self._alerting.update(look.world, reports, over, self._cursor_write())
        self._alerting.deliver()
        if self._is_due("trim", _TRIM_EVERY_S):
            self._trim()
        if self._sweep is not None and self._is_due("sweep", _SWEEP_EVERY_S):
            for line in self._sweep(self._election.guard):
                log.info("janitor: %s", line)

    # -- reading ------------------------------------------------------------------------------------------------
    def _range(self, prefix: str) -> list[KeyValue]:
        return self._store.range(prefix)[0]

    def _read(self) -> Look:
        keys, store = self._keys, self._store
        # Operations are read before what they are about: their wishes, written with them, are then seen too.
        operations = [(Operation.decode(kv.value), kv.mod_revision) for kv in self._range(keys.operations_prefix())]
        # The roster is read before the members: a member that closes in between is missing in the newer reading, and
        # the compare on its (deleted) roster key then fails instead of making a death of it.
        sightings = [(Sighting.decode(kv.value), kv.mod_revision) for kv in self._range(keys.roster_prefix())]
        members = [(Member.decode(kv.value), kv) for kv in self._range(keys.members_prefix())]
        self._learn([m for m, _ in members])
        living = [roster.of_member(m, kv.key, kv.create_revision,
                                   hung=progress.hung(m, self._learner.paces, self._limits)) for m, kv in members]
        nodes = [roster.of_node(DcsNode.decode(kv.value), kv.key, kv.create_revision)
                 for kv in self._range(keys.dcs_nodes_prefix())]
        seen = {(s.role, s.id, s.incarnation) for s, _ in sightings}
        self._beats = {who: at for who, at in self._beats.items() if who in seen}
        self._beats |= {(m.role, m.id, m.incarnation): m.beat_at for m, _ in members if m.beat_at}
        engines = [(Engine.decode(kv.value), kv.mod_revision) for kv in self._range(keys.engines_prefix())]
        pools = self._range(keys.pools_prefix())
        specs = [PoolSpec.decode(kv.value) for kv in pools if kv.key.endswith("/spec")]
        statuses = [PoolStatus.decode(kv.value) for kv in pools if kv.key.endswith("/status")]
        job, epoch = store.get(keys.job_status()), store.get(keys.epoch())
        heads = {s: kv.mod_revision for s in ("policy", "trainer_state") if (kv := store.get(keys.stream_head(s)))}
        faults = [(FaultLog.decode(kv.value), kv.mod_revision) for kv in self._range(keys.faults_prefix())]
        wishes = [Restart.decode(kv.value) for kv in self._range(keys.restarts_prefix())]
        world = alert_rules.World(
            job=keys.job, engines=[e for e, _ in engines], specs={s.name: s for s in specs},
            statuses={s.name: s for s in statuses}, status=JobStatus.decode(job.value) if job else None,
            roster=[s for s, _ in sightings], heads=heads, pool_hold_s=self._cfg.engine.start_timeout_s)
        return Look(self._clock(), world, {s.name: (s, rev) for s, rev in sightings},
                    {m.name: m for m in (*nodes, *living)},
                    {e.id: (e, rev) for e, rev in engines}, Epoch.decode(epoch.value).number if epoch else 0,
                    [m for m, _ in members], {f.target: (f, rev) for f, rev in faults},
                    {w.target: w for w in wishes}, {o.id: (o, rev) for o, rev in operations})

    def _learn(self, members: Sequence[Member]) -> None:
        """What the members' pace teaches; what is worth it is kept, unguarded: it is no decision, only experience."""
        for pace in self._learner.see({(m.role, m.id): m for m in members}):
            self._store.put(self._keys.pace(pace.role), pace.encode())

    # -- writing ------------------------------------------------------------------------------------------------
    def _guarded(self, compares: Sequence[Compare], then: Sequence[Op]) -> bool:
        """One transaction under the fencing token. False: a record changed meanwhile, and the next look sees how.

        Raises Fenced when the token is no longer good.
        """
        guard = list(self._election.guard)
        if self._store.txn([*guard, *compares], list(then)).succeeded:
            return True
        if not self._store.txn(guard, []).succeeded:
            raise Fenced(f"{self._election.replica} no longer leads")
        return False

    def _announce(self) -> None:
        """Makes this leadership known once: a record and the event leader.elected in one transaction."""
        mine = self._store.get(self._keys.leader(self._election.replica))
        if mine is None:
            raise Fenced(f"{self._election.replica} has no candidate key")
        found = self._store.get(self._keys.leadership())
        before = Leadership.decode(found.value) if found else None
        if self._term != mine.create_revision:  # others may have learned meanwhile
            self._term = mine.create_revision
            self._learner = Learner({p.role: p for p in (
                Pace.decode(kv.value) for kv in self._range(self._keys.paces_prefix()))})
        if before and before.term == mine.create_revision:
            return
        leader = Leader.decode(mine.value)
        record = Leadership(replica=leader.replica, url=leader.url, pid=leader.pid, term=mine.create_revision,
                            since=self._clock())
        after = f" after {before.replica}" if before else ""
        event = events.build("leader.elected", leader.replica, f"{leader.replica} leads{after}", term=record.term,
                             previous=before.replica if before else "", by=alert_rules.BY_LEADER)
        self._guarded([_unchanged(self._keys.leadership(), found.mod_revision if found else 0)],
                      [Op.put(self._keys.leadership(), record.encode()), events.put_op(self._keys, event)])

    def _update_roster(self, look: Look) -> None:
        steps = roster.step(look.now, {name: s for name, (s, _) in look.roster.items()}, look.living,
                            epoch=look.epoch, run_over=look.world.run_over, ended_epoch=look.ended_epoch,
                            coordinators=self._cfg.coordinator.replicas)
        for step in steps:
            key = self._keys.roster(*step.sighting.name)
            compares = [_unchanged(key, look.roster[step.sighting.name][1] if step.sighting.name in look.roster else 0)]
            ops = [Op.put(key, step.sighting.encode())]
            match step.change:
                case Change.FORGET | Change.REPLACED:
                    ops = [Op.delete(key)]
                    if step.living is not None:
                        ops.append(Op.delete(step.living.key))
                    if step.change is Change.REPLACED and step.sighting.role not in _TELL_THEMSELVES:
                        ops.append(events.put_op(self._keys, _recovered(step.sighting)))
                case Change.SEEN | Change.RETURNED:
                    assert step.living is not None
                    # A member that closed since it was read must not come back into the roster.
                    compares.append(Compare.create(step.living.key, "==", step.living.create_revision))
                    if step.change is Change.RETURNED:
                        ops.append(events.put_op(self._keys, _returned(step.sighting)))
                case Change.DIED | Change.HUNG | Change.RESUMED:
                    told = self._fault_ops(look, step)
                    compares += told[0]
                    ops += told[1]
            if self._guarded(compares, ops) and step.change in _FAULTS:
                log.warning("%s %s is %s", *step.sighting.name, step.change)

    def _fault_ops(self, look: Look, step: roster.Step) -> Writes:
        """What goes with a fault or its end: the event, what the policy notes of it and, for an engine that died, the
        end of its record."""
        who = step.sighting
        kind, words = _TOLD[step.change]
        doing = f" in {step.living.doing}" if step.living and step.change is Change.HUNG else ""
        event = events.build(f"{who.role}.{kind}", who.id, f"{who.role} {who.id} (pid {who.pid} on {who.host}) {words}"
                             f"{doing}", severity=Severity.INFO if step.change is Change.RESUMED else Severity.ERROR,
                             by=alert_rules.BY_LEADER, pid=who.pid, incarnation=who.incarnation,
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

    def _noticed(self, look: Look, step: roster.Step) -> dict[str, float]:
        """Seconds since a part's last sign of life, for the measurement of faults; nothing where it is not known."""
        who = step.sighting
        if step.change is Change.HUNG:
            last = next((m.progress_at for m in look.members if (m.role, m.id) == who.name), None)
        else:
            last = self._beats.get((who.role, who.id, who.incarnation)) if step.change is Change.DIED else None
        return {"detect_s": round(max(0.0, look.now - last), 3)} if last else {}

    def _ended_engine(self, look: Look, dead: Sighting) -> Writes:
        """The end of a dead engine's record; its driver then replaces it."""
        compares: list[Compare] = []
        ops: list[Op] = []
        engine, revision = look.engines.get(dead.id, (None, 0)) if dead.role == roster.ENGINE else (None, 0)
        if engine is not None and engine.state is not EngineState.DEAD:
            gone = engine.but(state=EngineState.DEAD, reason="its process died", updated_at=look.now)
            compares.append(_unchanged(self._keys.engine(engine.id), revision))
            ops.append(Op.put(self._keys.engine(engine.id), gone.encode()))
        return compares, ops

    def _follow_operations(self, look: Look) -> None:
        self._operations.follow(look.operations, View(
            now=look.now, specs=look.world.specs, statuses=look.world.statuses,
            engines={i: e for i, (e, _) in look.engines.items()}, restarts=look.restarts, members=look.members,
            job=look.world.status, epoch=look.epoch, trainer_ranks=self._cfg.trainer.ranks))
        self._operations.trim(look.operations)

    def _expel_outliers(self, look: Look) -> None:
        """Takes engines out whose weights differ from those of the others; their runners obey the record."""
        for engine in outliers(look.world.engines):
            reason = f"its weights of version {engine.version} differ from those of the other engines"
            gone = engine.but(state=EngineState.QUARANTINED, reason=reason, updated_at=look.now)
            event = events.build("engine.quarantined", engine.id, f"engine {engine.id}: {reason}",
                                 severity=Severity.ERROR, by=alert_rules.BY_LEADER, version=engine.version)
            key = self._keys.engine(engine.id)
            self._guarded([_unchanged(key, look.engines[engine.id][1])],
                          [Op.put(key, gone.encode()), events.put_op(self._keys, event)])

    def _read_events(self) -> tuple[list[alerts.Condition], set[str]]:
        """Events since the cursor: the alerts they ask for, and keys of those they end. The cursor moves together with
        the alerts, in ``Alerting.update``; a death that somebody reported is marked, so that it is told once."""
        found = self._store.get(self._keys.event_cursor())
        cursor = Cursor.decode(found.value) if found else Cursor(revision=0)
        self._cursor = (cursor.revision, found.mod_revision if found else 0)
        newest, _ = self._store.range(self._keys.events_prefix(), limit=_NEWEST, newest_first=True)
        if len(newest) == _NEWEST and min(kv.mod_revision for kv in newest) > self._cursor[0]:
            newest = self._range(self._keys.events_prefix())
        fresh = sorted((kv for kv in newest if kv.mod_revision > self._cursor[0]), key=lambda kv: kv.mod_revision)
        self._cursor_next = fresh[-1].mod_revision if fresh else self._cursor[0]
        self._tally = count(cursor.tally, (Event.decode(kv.value) for kv in fresh))
        reports, over = [], set()
        for kv in fresh:
            event = Event.decode(kv.value)
            if event.kind in ("engine.dead", "engine.replaced") and event.data.get("by") != alert_rules.BY_LEADER:
                self._mark_reported(roster.ENGINE, event.subject)
            if (condition := alert_rules.report(event, kv.mod_revision, self._keys.job)) is not None:
                reports.append(condition)
                over.discard(condition.key)
            if (key := alert_rules.ends(event, self._keys.job)) is not None:
                over.add(key)
        return reports, over

    def _mark_reported(self, role: str, member_id: str) -> None:
        key = self._keys.roster(role, member_id)
        found = self._store.get(key)
        known = Sighting.decode(found.value) if found else None
        if found and known and not known.dead:
            self._guarded([_unchanged(key, found.mod_revision)],
                          [Op.put(key, known.but(dead_at=self._clock(), reported=True).encode())])

    def _cursor_write(self) -> list[tuple[Compare, Op]]:
        if self._cursor_next == self._cursor[0]:
            return []
        return [(_unchanged(self._keys.event_cursor(), self._cursor[1]),
                 Op.put(self._keys.event_cursor(), Cursor(revision=self._cursor_next, tally=self._tally).encode()))]

    def _trim(self) -> None:
        kept = self._cfg.coordinator.events_keep
        items = self._range(self._keys.events_prefix())
        for start in range(0, max(0, len(items) - kept), _TXN_OPS):
            batch = items[start:min(start + _TXN_OPS, len(items) - kept)]
            self._guarded([], [Op.delete(kv.key) for kv in batch])
        self._thin_curve()

    def _thin_curve(self) -> None:
        prefix, limit = self._keys.steps_prefix(), self._cfg.coordinator.steps_keep
        if self._store.count(prefix) > limit:
            gone = to_thin([int(kv.key.removeprefix(prefix)) for kv in self._range(prefix)], limit)
            for start in range(0, len(gone), _TXN_OPS):
                self._guarded([], [Op.delete(self._keys.step_point(n)) for n in gone[start:start + _TXN_OPS]])

    def _is_due(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        if now < self._due.get(what, 0.0):
            return False
        self._due[what] = now + every_s
        return True


def _unchanged(key: str, revision: int) -> Compare:
    return Compare.mod(key, "==", revision) if revision else Compare.absent(key)


def _recovered(s: Sighting) -> Event:
    return events.build(f"{s.role}.recovered", s.id, f"another {s.role} does the work of {s.id}",
                        by=alert_rules.BY_LEADER)


def _returned(s: Sighting) -> Event:
    return events.build(f"{s.role}.returned", s.id, f"{s.role} {s.id} is back (pid {s.pid} on {s.host})",
                        by=alert_rules.BY_LEADER, pid=s.pid, incarnation=s.incarnation)
