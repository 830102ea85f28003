"""The leader's loop: compares the actual with the desired state of the job, writes what follows, and sends alerts.

Level-triggered: each pass takes a snapshot of etcd, so a leader that takes over continues where the last one stopped.
Its writes are transactions under its fencing token, and a record changes together with its event, so that each fault
gives one event, whatever dies in between. Nothing that matters is only in memory.

A pass has stages that do not depend on one another. A stage that fails is skipped, with an alert, and the others run. A
pass with a failed stage is not successful, and a leader without a successful pass for too long resigns
(``election.leader_health``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from elastic_rl.config import Config, CoordinatorConfig
from elastic_rl.coordinator.alerts.conditions import leader_conditions, under_replication
from elastic_rl.coordinator.alerts.controller import AlertController
from elastic_rl.coordinator.alerts.notifier import Notifier
from elastic_rl.coordinator.alerts.write_failures import WriteFailureNotifier
from elastic_rl.coordinator.autoscaling.controller import AutoscaleController
from elastic_rl.coordinator.dcs_sweep import DcsSweep
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.election.leader_gap import LeaderGap
from elastic_rl.coordinator.etcd_health import EtcdProbe
from elastic_rl.coordinator.event_reader import EventBatch, EventReader
from elastic_rl.coordinator.failure.controller import FailureController
from elastic_rl.coordinator.leader_clock import LeaderClock
from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.membership.controller import MembershipController
from elastic_rl.coordinator.operations.controller import OperationController
from elastic_rl.coordinator.operations.service import OperationService
from elastic_rl.coordinator.records import Leadership
from elastic_rl.coordinator.retention import Retention
from elastic_rl.coordinator.snapshot import ClusterSnapshot, SnapshotReader
from elastic_rl.coordinator.stragglers.controller import StragglerController
from elastic_rl.errors import ElasticRLError, EtcdDenied, EtcdFull, EtcdRefused, EtcdUnavailable, Fenced
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.decoding import decode
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Leader
from elastic_rl.runtime.failpoints import reach
from elastic_rl.telemetry import metrics, traces

log = logging.getLogger(__name__)

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0
"""Pauses between two passes: a burst of triggers is one pass."""
_IDLE_INTERVAL_S, _IDLE_DEADLINES = 1.5, 0.25
"""Longest pause between two passes over a job that is idle, and as a part of ``reconcile_deadline_s``."""
_LOG_EVERY_S = 60.0
_ENGINE_ENDED = (event_kinds.ENGINE_DEAD.name, event_kinds.ENGINE_REPLACED.name)
"""Kinds that say that an engine's process has ended; its runner or driver often writes them before its lease ends."""

_PASS_S = metrics.histogram("reconcile_seconds", "Duration of a reconcile pass of the leader", (metrics.JOB_LABEL,))
_FAILED = metrics.counter("reconcile_failures", "Reconcile passes that failed", (metrics.JOB_LABEL, "error"))


def loop_of(job: str) -> str:
    """Name of the leader's loop of a job (``LeaderHealth``)."""
    return f"job {job}"


def interval_s(cfg: CoordinatorConfig, *, idle: bool) -> float:
    """Longest pause before the next pass. ``idle``: nothing of the job changes but by a write, which starts a pass."""
    usual = cfg.reconcile_interval_s
    return max(usual, min(_IDLE_INTERVAL_S, _IDLE_DEADLINES * cfg.reconcile_deadline_s)) if idle else usual


class PassFailed(ElasticRLError):
    """Stages of a reconcile pass failed; the log has the tracebacks."""


class Reconciler:
    """Runs passes in a thread while this replica leads: one after each interval, and one when ``wake`` is called."""

    def __init__(self, etcd: EtcdClient, keys: Keys, cfg: Config, election: Election, notifier: Notifier, *,
                 sweep: DcsSweep | None = None, clock: Callable[[], float] = time.time,
                 monotonic: Callable[[], float] = time.monotonic) -> None:
        self._etcd, self._keys, self._cfg, self._election = etcd, keys, cfg, election
        self._sweep, self._clock = sweep, clock
        self._loop = loop_of(keys.job)
        self._wake, self._stopping = threading.Event(), threading.Event()
        guarded = election.writer
        operations = OperationService(etcd, keys, election, cfg, clock=clock)
        self._operations = OperationController(
            keys, {group.name: cfg.of_group(group).trainer.ranks for group in cfg.trainer_groups}, guarded)
        self._autoscaling = AutoscaleController(etcd, keys, cfg, operations, guarded)
        self._failures = FailureController(etcd, keys, cfg.failure_policy, operations, guarded)
        self._membership = MembershipController(etcd, keys, cfg, self._failures.record_fault, guarded)
        self._stragglers = StragglerController(keys, cfg, self._failures.record_straggler, guarded)
        self._probe, self._write_failures = EtcdProbe(etcd, keys), WriteFailureNotifier(notifier)
        self._pass_failures = WriteFailureNotifier(
            notifier, kind="reconcile.failing", subject=election.replica,
            consequence="The leader decides nothing and sends no other alert; see its log.",
            resolved="Its reconcile passes succeed again.")
        self._events, self._term = EventReader(etcd, keys), 0
        self._leader_clock = LeaderClock(etcd, keys, guarded, monotonic)
        self._reader = SnapshotReader(etcd, keys, cfg, clock, self._leader_clock.now, self._probe)
        self._alerts = AlertController(etcd, keys, cfg, notifier, guarded, leads=lambda: election.is_leader,
                                       clock=clock)
        self._gap = LeaderGap(etcd, keys, election, cfg.alerts.leader_gap_s, guarded, clock)
        self._retention = Retention(etcd, keys, cfg.coordinator, guarded, clock)
        self._interval_s = interval_s(cfg.coordinator, idle=False)
        """Longest pause before the next pass."""
        self._stage_errors: dict[str, str] = {}
        """Error of each stage that failed in the last pass."""
        self._logged: dict[str, float] = {}
        notifier.on_result(self.wake)
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        """Begins to make passes; the caller has the health of the leader expect them (``loop_of``)."""
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._probe.close()

    @property
    def ended(self) -> bool:
        """Whether no pass is in progress, and none will be."""
        return self._stopping.is_set() and not self._thread.is_alive()

    # -- the loop -----------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._wake.wait(self._interval_s)
                self._wake.clear()
                if not self._stopping.is_set() and self._election.is_leader:
                    began = time.monotonic()
                    self._run_pass()
                    # In a large cluster something changes all the time: a pass may take half of a core, and no more.
                    self._stopping.wait(min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, time.monotonic() - began)))
        finally:
            for metric in (_PASS_S, _FAILED):  # here, where no pass can add to them any more
                metric.remove_by_labels({metrics.JOB_LABEL: self._keys.job})
            if not self._stopping.is_set():
                # Only an error in this loop itself ends it: without it the replica can never lead again.
                os.kill(os.getpid(), signal.SIGTERM)

    def _run_pass(self) -> None:
        """One pass, whatever it raises; the next one reads everything again."""
        health, loop = self._election.health, self._loop
        health.pass_began(loop)
        try:
            with _PASS_S.labels(self._keys.job).time(), traces.span("coordinator.reconcile"):
                self.reconcile_once()
        except Fenced as e:  # another replica leads: nothing has failed
            health.pass_failed(loop, str(e))
            log.info("pass ended: %s", e)
        except (EtcdDenied, EtcdFull, EtcdRefused) as e:
            self._failed(e, stays=isinstance(e, EtcdFull))
            self._write_failures.failed(str(e))
        except EtcdUnavailable as e:
            self._failed(e)
        except PassFailed as e:
            self._failed(e)
            if "alerts" in self._stage_errors:
                self._pass_failures.failed(str(e))
        except Exception as e:  # a bug must not end the replica: the others would meet it next
            self._failed(e, bug=True)
            self._pass_failures.failed(f"{type(e).__name__}: {e}")
        else:
            health.pass_succeeded(loop)
            self._write_failures.succeeded()
            self._pass_failures.succeeded()

    def _failed(self, error: Exception, *, stays: bool = False, bug: bool = False) -> None:
        _FAILED.labels(self._keys.job, type(error).__name__).inc()
        self._log_failure("the reconcile pass", error, bug=bug)
        self._election.health.pass_failed(self._loop, f"{type(error).__name__}: {error}", stays=stays)

    def _log_failure(self, what: str, error: Exception, *, bug: bool) -> None:
        """Logs an error, the same one at most once a minute: passes follow one another in fractions of a second.
        ``bug``: with its traceback."""
        now, described = time.monotonic(), f"{what} failed: {type(error).__name__}: {error}"
        if now - self._logged.get(described, float("-inf")) >= _LOG_EVERY_S:
            self._logged = {text: at for text, at in self._logged.items() if now - at < _LOG_EVERY_S} | {described: now}
            log.log(logging.ERROR if bug else logging.WARNING, "%s", described, exc_info=error if bug else None)

    # -- one pass -----------------------------------------------------------------------------------------------
    def reconcile_once(self) -> None:
        """One pass. Raises Fenced when the leadership is over, EtcdUnavailable when etcd does not answer, PassFailed
        when stages failed."""
        self._stage_errors, self._interval_s = {}, interval_s(self._cfg.coordinator, idle=False)
        self._begin_term()
        self._gap.update()
        self._leader_clock.persist()
        batch = self._events.read()
        with self._stage("reported_deaths"):
            self._record_reported_deaths(batch)
        snapshot = self._reader.read()
        with self._stage("membership"):
            wrote = self._membership.update(snapshot)
            if self._membership.quarantine_outliers(snapshot) or wrote:
                snapshot = self._reader.read()
        with self._stage("stragglers"):
            self._stragglers.update(snapshot)
        with self._stage("failure_policy"):
            self._failures.record_reports(batch.events, snapshot)
            self._failures.act(snapshot)
            self._failures.collect_garbage(snapshot)
        with self._stage("operations"):
            self._operations.update(snapshot)
            self._operations.trim(snapshot)
        with self._stage("autoscaling"):
            self._autoscaling.update(snapshot)
        with self._stage("retention"):
            self._retention.trim()
        with self._stage("alerts"):
            self._update_alerts(snapshot, batch)
        if batch.full:
            self.wake()
        self._interval_s = interval_s(self._cfg.coordinator, idle=snapshot.is_idle and not self._stage_errors)
        if self._stage_errors:
            raise PassFailed("; ".join(f"{stage}: {error}" for stage, error in self._stage_errors.items()))

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Runs a stage of the pass; an error of its own does not stop the others."""
        try:
            yield
        except (Fenced, EtcdUnavailable):  # no other stage could do better
            raise
        except Exception as e:
            self._log_failure(f"stage {name} of the reconcile pass", e, bug=True)
            self._stage_errors[name] = f"{type(e).__name__}: {e}"

    def _begin_term(self) -> None:
        """Announces this leadership to the job once: a record, the event leader.elected, and the key of the job's
        leader, which lives as long as this candidacy, in one transaction."""
        if self._term == self._election.term:
            return
        mine = self._etcd.get(self._election.key)
        if mine is None:
            raise Fenced(f"{self._election.replica} has no candidate key")
        self._reader.forget()
        self._membership.begin_term()
        self._stragglers.begin_term()
        self._leader_clock.begin_term()
        found, named = self._etcd.get(self._keys.leadership()), self._etcd.get(self._keys.leader())
        before = decode(found, Leadership, {}) if found else None
        is_named = named is not None and named.lease == mine.lease
        ops = [] if is_named else [Op.put(self._keys.leader(), mine.value, mine.lease)]
        if before is None or before.term != mine.create_revision:
            leader = Leader.decode(mine.value)
            record = Leadership(replica=leader.replica, url=leader.url, pid=leader.pid, term=mine.create_revision,
                                since=self._clock())
            after = f" after {before.replica}" if before else ""
            event = events.build(event_kinds.LEADER_ELECTED, leader.replica, f"{leader.replica} leads{after}",
                                 term=record.term, previous=before.replica if before else "", by=registry.BY_LEADER)
            ops += [Op.put(self._keys.leadership(), record.encode()), events.put_op(self._keys, event)]
        unchanged = Compare.mod(self._keys.leadership(), "==", found.mod_revision if found else 0)
        reach("leader.elected")
        if ops and not self._election.writer([unchanged], ops):
            return  # the next pass announces it
        reach("leader.announced")
        self._term = mine.create_revision

    def _record_reported_deaths(self, batch: EventBatch) -> None:
        for event, revision in batch.events:
            if event.kind in _ENGINE_ENDED and event.data.get("by") != registry.BY_LEADER:
                self._membership.mark_reported(event_kinds.ENGINE, event.subject,
                                               str(event.data.get("incarnation", "")), self._clock(), revision)

    def _update_alerts(self, snapshot: ClusterSnapshot, batch: EventBatch) -> None:
        own = leader_conditions(self._election.replica, self._stage_errors,
                                "" if self._sweep is None else self._sweep.problem())
        unknown = set[str]()
        if self._sweep is not None:
            short, unknown = under_replication(
                self._sweep.under_replication, time.monotonic(), snapshot, self._cfg.alerts.under_replicated_s,
                self._cfg.alerts.full_fraction)
            own += short
        self._alerts.update(snapshot, batch.reports, batch.over, batch.cursor, own, unknown)
        self._alerts.deliver()
