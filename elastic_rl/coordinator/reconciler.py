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

from pydantic import ValidationError

from elastic_rl.config import Config
from elastic_rl.coordinator.alerts import rules, state_machine
from elastic_rl.coordinator.alerts.controller import AlertController
from elastic_rl.coordinator.alerts.notifier import Notifier
from elastic_rl.coordinator.alerts.write_failures import WriteFailureNotifier
from elastic_rl.coordinator.api import idempotency
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.election.leader_gap import LeaderGap
from elastic_rl.coordinator.etcd_health import EtcdProbe
from elastic_rl.coordinator.failure.controller import FailureController
from elastic_rl.coordinator.failure.statistics import EventCursor, count
from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.membership.controller import MembershipController
from elastic_rl.coordinator.operations.controller import OperationController
from elastic_rl.coordinator.operations.service import OperationService
from elastic_rl.coordinator.records import Leadership
from elastic_rl.coordinator.snapshot import SnapshotReader
from elastic_rl.coordinator.step_metrics import downsample
from elastic_rl.errors import ElasticRLError, EtcdDenied, EtcdFull, EtcdRefused, Fenced
from elastic_rl.etcd import events
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Event, Leader
from elastic_rl.etcd.transaction import MAX_OPS, batches
from elastic_rl.telemetry import metrics, traces

log = logging.getLogger(__name__)

_TRIM_EVERY_S = 15.0
_FORGET_EVERY_S = 600.0
_SWEEP_EVERY_S = 2.0
"""etcd takes at most 128 operations in a transaction; the client adds its own."""
_NEWEST = 64

_LOOK_S = metrics.histogram("reconcile_seconds", "Duration of one look of the leader")
_FAILED = metrics.counter("reconcile_failures", "Looks that ended with an error", ("error",))

Sweep = Callable[[Sequence[Compare]], list[str]]


class Reconciler:
    """Runs ``look`` in a thread: after each interval, and at once when ``wake`` is called."""

    def __init__(self, etcd: EtcdClient, keys: Keys, cfg: Config, election: Election, notifier: Notifier, *,
                 sweep: Sweep | None = None, clock: Callable[[], float] = time.time) -> None:
        self._etcd, self._keys, self._cfg, self._election = etcd, keys, cfg, election
        self._sweep, self._clock = sweep, clock
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._due: dict[str, float] = {}
        self._operations = OperationController(keys, cfg.trainer.ranks, self._guarded)
        self._failures = FailureController(etcd, keys, cfg.failure_policy,
                                           OperationService(etcd, keys, election, cfg, clock=clock), self._guarded)
        self._membership = MembershipController(etcd, keys, cfg, self._failures.record_fault, self._guarded)
        self._probe, self._outcry = EtcdProbe(etcd, keys), WriteFailureNotifier(notifier)
        self._reader, self._term = SnapshotReader(etcd, keys, cfg, clock, self._probe), 0
        self._alerting = AlertController(etcd, keys, cfg, notifier, self._guarded, leads=lambda: election.is_leader,
                                        clock=clock)
        self._absence = LeaderGap(etcd, keys, election, cfg.alerts.leaderless_s, self._guarded, clock)
        notifier.on_outcome(self.wake)
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)
        self.last_pass = 0.0
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
                    self.reconcile_once()
                self.last_pass = self._clock()
                self._outcry.over()
            except (EtcdDenied, EtcdFull, EtcdRefused) as e:
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

    def reconcile_once(self) -> None:
        """One pass. Raises Fenced when the leadership is over, EtcdUnavailable when etcd does not answer."""
        self._announce()
        self._absence.look()
        reports, over = self._read_events()
        snapshot = self._reader.read()
        wrote = self._membership.update(snapshot)
        if self._membership.quarantine_outliers(snapshot) or wrote:
            snapshot = self._reader.read()
        self._failures.act(snapshot)
        self._operations.update(snapshot)
        self._operations.trim(snapshot)
        self._alerting.update(snapshot, reports, over, self._cursor_write())
        self._alerting.deliver()
        if self._is_due("trim", _TRIM_EVERY_S):
            self._trim()
        if self._is_due("forget", _FORGET_EVERY_S):
            idempotency.trim(self._etcd, self._keys, self._clock(), self._guarded)
        if self._sweep is not None and self._is_due("sweep", _SWEEP_EVERY_S):
            for line in self._sweep(self._election.guard):
                log.info("janitor: %s", line)

    # -- reading ------------------------------------------------------------------------------------------------
    def _range(self, prefix: str) -> list[KeyValue]:
        return self._etcd.range(prefix)[0]

    # -- writing ------------------------------------------------------------------------------------------------
    def _guarded(self, compares: Sequence[Compare], then: Sequence[Op]) -> bool:
        """One transaction under the fencing token. False: a record changed meanwhile, and the next look sees how.

        Raises Fenced when the token is no longer good.
        """
        guard = list(self._election.guard)
        if self._etcd.txn([*guard, *compares], list(then)).succeeded:
            return True
        if not self._etcd.txn(guard, []).succeeded:
            raise Fenced(f"{self._election.replica} no longer leads")
        return False

    def _announce(self) -> None:
        """Makes this leadership known once: a record and the event leader.elected in one transaction."""
        mine = self._etcd.get(self._keys.leader(self._election.replica))
        if mine is None:
            raise Fenced(f"{self._election.replica} has no candidate key")
        found = self._etcd.get(self._keys.leadership())
        before = Leadership.decode(found.value) if found else None
        if self._term != mine.create_revision:
            self._term = mine.create_revision
            self._membership.begin_term()
        if before and before.term == mine.create_revision:
            return
        leader = Leader.decode(mine.value)
        record = Leadership(replica=leader.replica, url=leader.url, pid=leader.pid, term=mine.create_revision,
                            since=self._clock())
        after = f" after {before.replica}" if before else ""
        event = events.build("leader.elected", leader.replica, f"{leader.replica} leads{after}", term=record.term,
                             previous=before.replica if before else "", by=registry.BY_LEADER)
        self._guarded([_unchanged(self._keys.leadership(), found.mod_revision if found else 0)],
                      [Op.put(self._keys.leadership(), record.encode()), events.put_op(self._keys, event)])

    def _read_events(self) -> tuple[list[state_machine.Condition], set[str]]:
        """Events since the cursor: the alerts they ask for, and keys of those they end. The cursor moves together with
        the alerts, in ``AlertController.update``; a death that somebody reported is marked, so that it is told once."""
        found = self._etcd.get(self._keys.event_cursor())
        cursor = EventCursor.decode(found.value) if found else EventCursor(revision=0)
        self._cursor = (cursor.revision, found.mod_revision if found else 0)
        newest, _ = self._etcd.range(self._keys.events_prefix(), limit=_NEWEST, newest_first=True)
        if len(newest) == _NEWEST and min(kv.mod_revision for kv in newest) > self._cursor[0]:
            newest = self._range(self._keys.events_prefix())
        fresh = sorted((kv for kv in newest if kv.mod_revision > self._cursor[0]), key=lambda kv: kv.mod_revision)
        self._cursor_next = fresh[-1].mod_revision if fresh else self._cursor[0]
        self._statistics = count(cursor.statistics, (Event.decode(kv.value) for kv in fresh))
        reports, over = [], set()
        for kv in fresh:
            event = Event.decode(kv.value)
            if event.kind in ("engine.dead", "engine.replaced") and event.data.get("by") != registry.BY_LEADER:
                self._membership.mark_reported(registry.ENGINE, event.subject, self._clock(), kv.mod_revision)
            if (condition := rules.report(event, kv.mod_revision, self._keys.job)) is not None:
                reports.append(condition)
                over.discard(condition.key)
            if (key := rules.ends(event, self._keys.job)) is not None:
                over.add(key)
        return reports, over

    def _cursor_write(self) -> list[tuple[Compare, Op]]:
        if self._cursor_next == self._cursor[0]:
            return []
        return [(_unchanged(self._keys.event_cursor(), self._cursor[1]),
                 Op.put(self._keys.event_cursor(),
                        EventCursor(revision=self._cursor_next, statistics=self._statistics).encode()))]

    def _trim(self) -> None:
        kept = self._cfg.coordinator.events_keep
        prefix = self._keys.events_prefix()
        while (over := self._etcd.count(prefix) - kept) > 0:  # their keys sort by time: the first are the oldest
            oldest, _ = self._etcd.range(prefix, limit=min(over, MAX_OPS))
            self._guarded([], [Op.delete(kv.key) for kv in oldest])
        self._thin_curve()

    def _thin_curve(self) -> None:
        prefix, limit = self._keys.steps_prefix(), self._cfg.coordinator.steps_keep
        if self._etcd.count(prefix) > limit:
            gone = downsample([int(kv.key.removeprefix(prefix)) for kv in self._range(prefix)], limit)
            for batch in batches([Op.delete(self._keys.step_point(n)) for n in gone]):
                self._guarded([], batch)

    def _is_due(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        if now < self._due.get(what, 0.0):
            return False
        self._due[what] = now + every_s
        return True


def _unchanged(key: str, revision: int) -> Compare:
    return Compare.mod(key, "==", revision) if revision else Compare.absent(key)
