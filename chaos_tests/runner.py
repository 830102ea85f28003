"""Runs a schedule of faults against a cluster, and writes down all that happens, in a folder.

A folder of results has ``schedule.json``, which reproduces the run, ``events.jsonl`` (``event_log``), from which it is
judged and its report is made, and ``baseline/`` with the same of the run without faults. What faults have left to be
undone is in ``undo.jsonl``, and a file ``abort`` ends the run (``abort``).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from chaos_tests import abort
from chaos_tests.abort import AbortSwitch
from chaos_tests.collectors import EventCopier, FaultCopier, Poller, Say, StepCopier, without_seal, without_secrets
from chaos_tests.event_log import FORM, EventLog, Kind
from chaos_tests.faults.catalogue import plan_of
from chaos_tests.nemesis.schedule import Schedule
from chaos_tests.observation import Observer, require_client
from chaos_tests.provenance import commit, versions
from chaos_tests.receiver import Notice, Receiver
from chaos_tests.report import BASELINE, EVENTS
from chaos_tests.results import Outcome, prepare, reported, require_new, shown
from chaos_tests.sampler import Sampler
from chaos_tests.scenarios import SCENARIOS, Scenario, Tier, must_see
from chaos_tests.target import Target, own_cluster, own_config, run_dir_of
from chaos_tests.target_hosts import hosts_cluster, receiver_address
from chaos_tests.traffic.traffic import Traffic
from chaos_tests.traffic.watchers import Watcher
from chaos_tests.traffic.workloads import WORKLOADS, During
from chaos_tests.validate.growth import FEWEST_STEPS
from chaos_tests.validate.running import RECOVERIES, RECOVERY_S, Presence
from chaos_tests.validate.verdict import OWN_TARGETS
from elastic_rl.config import Config, secrets
from elastic_rl.coordinator.alerts.state_machine import Phase
from elastic_rl.errors import ConfigError, ElasticRLError, EtcdUnavailable
from elastic_rl.etcd.keys import ROOT
from elastic_rl.faults.context import Fault, FaultContext
from elastic_rl.faults.injector import FaultInjector
from elastic_rl.faults.undo import UndoRegistry, undo_all
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.host.test_hosts import isolated_hosts
from elastic_rl.pipeline.records.run_log import LineFile, RunLog
from elastic_rl.runtime.patience import patiently

log = logging.getLogger(__name__)

_POLL_S = 1.0
_SAMPLE_S = 10.0
_ALERTS_END_S = 60.0
"""Time for the alerts of faults that are over to end too: each has a hold of its own."""
_LEASES_END_S = 30.0
"""Time for leases to end beyond the longest of them, that of a pin."""
_MOST_KEYS = 20
"""The log names so many keys that are left at most."""
_END_S = 30.0
"""Longest wait for what is under way once a run is to end."""
_SAID_AFTER_S = 10.0
"""A wait for what is to come back is said once it has lasted so long."""
_LAST_KEY = "zz-end"
"""A key of the job that is written when a run ends: a watch of the job that has delivered its change has delivered all
that was before."""
_BY_TIME_STEPS = 1_000_000
"""Steps of a job that is run by time: it is stopped before."""
OnSwitch = Callable[[AbortSwitch], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """How faults are injected into a target."""

    overlap: int = 1
    """Strikes that may be under way at once."""
    recovery_s: float = RECOVERY_S
    """A fault from which the job has not recovered after so long is given up."""
    late: float = 3.0
    """A run by time ends when its minutes are over and each of its faults has had its turn, and after so many times its
    minutes in any case."""
    aborts_itself: bool = False
    """Whether a run ends early for a reason of ``abort.reason``. On a cluster of its own that is a finding."""
    arguments: Sequence[str] = ()
    """Words of a command line that strikes the same job with the same limits."""
    guard: Callable[[FaultContext], Callable[[str, Fault], Fault]] | None = None
    """Makes of each fault the one that is injected (``blast_radius.guarded``)."""


# -- runs --------------------------------------------------------------------------------------------------------------
def run(schedule: Schedule, folder: Path, *, say: Say = log.info, switch: OnSwitch = lambda switch: None) -> Outcome:
    """Runs a schedule on a cluster of its own. ``switch``: called with the run's abort switch before anything is
    started. Raises ConfigError for a schedule of an unknown scenario, or a folder with results, and another
    ElasticRLError where the cluster or its job cannot be started."""
    scenario = scenario_of(schedule)
    require_client()
    if scenario.tier is Tier.TEST_HOSTS:
        isolated_hosts.require()
    require_new(folder)
    with abort.running(folder) as aborts:
        prepare(schedule, folder)
        switch(aborts)
        if scenario.baseline if schedule.baseline is None else schedule.baseline:
            say("the baseline: the same job without faults")
            (folder / BASELINE).mkdir(mode=0o700)
            _run_own(scenario, replace(schedule, strikes=()), folder / BASELINE, aborts, say, baseline=True)
            if aborts.why:
                return replace(reported(folder / BASELINE), folder=folder)
        say(f"the run with {schedule.faults} faults")
        _run_own(scenario, schedule, folder, aborts, say, baseline=False)
        return reported(folder)


def run_attached(schedule: Schedule, folder: Path, target: Target, limits: Limits, *, say: Say = log.info,
                 switch: OnSwitch = lambda switch: None) -> Outcome:
    """Runs a schedule against a job that runs already and goes on afterwards. Otherwise as ``run``."""
    scenario = scenario_of(schedule)
    require_client()
    require_new(folder)
    with abort.alone(ClusterPaths.of(target.cfg).folder), abort.running(folder) as aborts:
        prepare(schedule, folder)
        switch(aborts)
        with _log_of(folder, schedule, target.cfg, target.name, limits, baseline=False) as event_log:
            end = _Run(target, scenario, schedule, folder, event_log, aborts, limits, say).run_to_end()
            _write_end(event_log, end, aborts)
        return reported(folder)


def scenario_of(schedule: Schedule) -> Scenario:
    """Raises ConfigError for a schedule that names none of the scenarios."""
    if schedule.scenario not in SCENARIOS:
        raise ConfigError(f"there is no scenario {schedule.scenario!r}", hint=f"known: {', '.join(SCENARIOS)}")
    return SCENARIOS[schedule.scenario]


def _run_own(scenario: Scenario, schedule: Schedule, folder: Path, aborts: AbortSwitch, say: Say, *, baseline: bool
             ) -> None:
    on_hosts = scenario.tier is Tier.TEST_HOSTS
    notices = list[tuple[float, Notice]]()
    receiver = Receiver(lambda notice: notices.append((time.time(), notice)),
                        receiver_address(run_dir_of(folder)) if on_hosts else "127.0.0.1")
    kept = dict[str, Any]()
    make: Callable[..., AbstractContextManager[Target]] = (
        hosts_cluster if on_hosts else partial(own_cluster, on_kept=kept.update))
    try:
        cfg = own_config(folder, {**scenario.settings, "train.steps": schedule.steps or _BY_TIME_STEPS,
                                  "alerts.urls": [receiver.url]}, schedule.settings, seed=schedule.seed)
        limits = Limits(scenario.overlap, late=scenario.late)
        with _log_of(folder, schedule, cfg, scenario.tier.value, limits, baseline=baseline) as event_log:
            with make(cfg, say=say, on_leftover=lambda what: event_log.write(Kind.LEFTOVER, what=what)) as target:
                end = _Run(target, scenario, schedule, folder, event_log, aborts, limits, say).run_to_end()
            for at, notice in notices:
                event_log.write(Kind.NOTIFICATION, at=at, **asdict(notice))
            _write_end(event_log, end if on_hosts else {**end, "kept": kept or None}, aborts)
    finally:
        receiver.close()


def _write_end(event_log: EventLog, end: Mapping[str, Any], aborts: AbortSwitch) -> None:
    event_log.write(Kind.END, **end, aborted=aborts.why, records=dict(event_log.written))


@contextmanager
def _log_of(folder: Path, schedule: Schedule, cfg: Config, target: str, limits: Limits, *, baseline: bool
            ) -> Iterator[EventLog]:
    scenario, event_log = scenario_of(schedule), EventLog(folder / EVENTS)
    traffic = scenario.traffic if target in OWN_TARGETS else ()
    try:
        event_log.write(
            Kind.RUN, form=FORM, scenario=schedule.scenario, seed=schedule.seed, target=target, baseline=baseline,
            compares=not baseline and (folder / BASELINE).exists(),
            schedule=json.loads(shown(schedule).to_json()), arguments=[*limits.arguments], recovery_s=limits.recovery_s,
            settings=secrets.redacted(cfg.model_dump(mode="json")),
            versions=versions(), commit=commit(), traffic=[*traffic],
            must_see=must_see(schedule, own=target in OWN_TARGETS,
                              compared=cfg.deterministic and (folder / BASELINE).exists()),
            floor={"steps": scenario.floor_steps, **({"answers": scenario.floor_answers} if traffic else {}),
                   **{model: 1 for name in traffic if (model := WORKLOADS[name].model)}})
        yield event_log
    finally:
        event_log.close()


# -- one run -----------------------------------------------------------------------------------------------------------
class _Run:
    """One run of a job under a schedule, on a target whose job was submitted."""

    def __init__(self, target: Target, scenario: Scenario, schedule: Schedule, folder: Path, event_log: EventLog,
                 aborts: AbortSwitch, limits: Limits, say: Say) -> None:
        self._target, self._scenario, self._schedule, self._folder = target, scenario, schedule, folder
        self._log, self._aborts, self._limits, self._say = event_log, aborts, limits, say
        self._sampler = Sampler(target.cluster, target.reader, target.api)
        self._traffic: dict[During, list[Traffic]] = {during: [] for during in During}
        """The clients that go on now, by how long they do."""
        self._presence, self._lock = Presence(), threading.Lock()
        self._problems = list[str]()
        self._alerts = dict[str, float]()
        """When each alert was seen first, by its id."""
        self._secret = target.cluster_keys.submission("")
        """Prefix of the keys that have the environment of whoever submitted a job, sealed."""

    def run_to_end(self) -> dict[str, Any]:
        """Returns when the run has ended, with what the last record of the log says of it. Where etcd is away by then,
        only what etcd alone has is missing."""
        target = self._target
        since = 1 if target.own else target.etcd.revision() + 1
        observer = Observer(target.info.etcd_endpoints, f"{ROOT}/", since, self._on_change,
                            log=self._folder / "observer.log", access=target.cluster.here.etcd,
                            on_gap=self._on_gap, on_present=self._on_present)
        steps = StepCopier(target, self._log)
        # What the run takes and keeps is judged where nothing begins again, on a cluster that nobody else uses.
        samples = [(self._sample_store, _SAMPLE_S), (self._sample_processes, _SAMPLE_S)] if (
            target.own and (not self._schedule.strikes or self._schedule.fault_free_steps >= FEWEST_STEPS)) else []
        pollers = [Poller(poll, every_s) for poll, every_s in (
            (steps.poll, _POLL_S), (EventCopier(target, self._log).poll, _POLL_S), *samples)]
        mark: int | None = None
        try:
            self._begin_traffic(During.RUN)
            self._inject(steps)
            self._end_traffic(During.FAULTS)
            runs = target.own and not self._over()
            if runs:
                self._await_return(steps)
            self._end_traffic(During.JOB)
            if runs:
                self._say("stopping the job")
                with suppress(EtcdUnavailable):  # the job then ends with the cluster
                    target.stop_job()
            self._await_alerts()
            if target.own and self._over():
                self._await_leases()
            end = self._end()
            if end["committed_steps"] is not None:
                mark = _answered(self._mark, time.monotonic())
        finally:
            for during in reversed(During):
                self._end_traffic(during, mark)
            for poller in pollers:
                self._finish(poller.close)
            self._finish(partial(_end_observer, observer, mark))
        return {**end, "problems": self._problems, "revision": mark}

    def _mark(self) -> int | None:
        """The revision of a change that the observer is to have seen, by the end of the run: one that is made for that,
        or, where others use the cluster, the last one of its leader."""
        target = self._target
        if target.own:
            return target.reader.put(f"{target.keys.root}{_LAST_KEY}", b"")
        clock = target.reader.get(target.cluster_keys.leader_clock())
        return clock.mod_revision if clock is not None else None

    def _end_traffic(self, during: During, mark: int | None = None) -> None:
        """The clients of this period end. ``mark``: revision of the last change of the run; None where it is not
        known."""
        traffic = self._traffic[during]
        if traffic and during is During.FAULTS:
            self._say("waiting for the clients to end what they change")
        while traffic:
            self._finish(partial(_end, traffic.pop(), mark))

    def _finish(self, finish: Callable[[], None]) -> None:
        """Ends a part of the run. Whatever comes of it, the rest is worth judging."""
        try:
            finish()
        except Exception as e:
            log.exception("at the end of the run")
            self._problems.append(str(e) if isinstance(e, ElasticRLError) else f"{type(e).__name__}: {e}")

    def _await_return(self, steps: StepCopier) -> None:
        """Waits, before the job is asked to stop, until all that it runs on is back and it has made a further step, or
        for as long as a recovery may take: what is short then is found by the checkers."""
        since, until, said = time.time(), time.monotonic() + self._limits.recovery_s, False
        while not self._aborts.why and not self._over():
            with self._lock:
                short, revision = self._presence.short(), self._presence.revision
            if not short and steps.done_at >= since or time.monotonic() >= until:
                for what in short:
                    self._say(f"not back after {self._limits.recovery_s:g} s: {what}")
                self._log.write(Kind.STOP, since=since, revision=revision, step=steps.newest)
                return
            if not said and time.time() > since + _SAID_AFTER_S:
                said = True
                self._say(f"waiting for {'; '.join(short) or 'a further step'}")
            self._aborts.wait(_POLL_S)

    def _begin_traffic(self, *during: During) -> None:
        """Begins what goes on on a cluster of the run's own: others may not have what it does to theirs."""
        for n, name in enumerate(self._scenario.traffic if self._target.own else ()):
            if (workload := WORKLOADS[name]).during in during:
                self._traffic[workload.during].append(
                    workload.make(self._target, self._schedule.seed + n, self._log).start())

    def _inject(self, steps: StepCopier) -> None:
        """Returns when the run is to end, with all undone that faults have left."""
        injector = self._injector()
        injector.start()
        try:
            self._await_end(injector, steps)
        finally:
            injector.end()
            injector.join(_END_S)
            if injector.is_alive():
                self._problems.append(f"a fault has not ended {_END_S:g} s after the run")
            left = [f"not undone: {what}" for what in undo_all(self._folder).failed]
            try:
                self._target.heal()
            except ElasticRLError as e:
                left.append(f"not healed: {e.message}")
            for what in left:  # after all of it: the disk of the log may be full
                self._log.write(Kind.LEFTOVER, what=what)

    def _end(self) -> dict[str, Any]:
        target, until = self._target, time.monotonic() + _END_S
        return {"phase": _answered(self._phase, until) or "", "report": _answered(target.report, until) or {},
                "committed_steps": _answered(target.committed_steps, until),
                **({"refused": _answered(target.refused, until)} if target.own else {}),
                "alerts": [json.loads(alert.encode()) for alert in _answered(target.alerts, until) or []]}

    def _injector(self) -> FaultInjector:
        target = self._target
        context = target.context(UndoRegistry(self._folder))
        guard = self._limits.guard(context) if self._limits.guard else lambda name, fault: fault
        return FaultInjector(
            context, FaultCopier(self._log, RunLog(LineFile(target.paths.faults)), self._say),
            plan_of(self._schedule, guard)(context, self._schedule.steps),
            *(paths.steps for paths in target.folders), overlap=self._limits.overlap,
            rest_steps=self._scenario.rest_steps, heal_timeout_s=self._limits.recovery_s)

    def _await_end(self, injector: FaultInjector, steps: StepCopier) -> None:
        """Returns when the job has ended, the time of a run by time is over, or the run is aborted."""
        length_s, began_s = self._schedule.minutes * 60.0, None
        done, progress_s = steps.done, time.monotonic()
        while not self._aborts.why:
            if self._target.own and self._over():
                return
            if self._log.error is not None:
                self._aborts.request(f"the log of the run cannot be written: {self._log.error}")
                return
            if self._limits.aborts_itself and (why := self._reason(injector)):
                self._aborts.request(why)
                return
            if began_s is None and steps.newest:
                began_s = time.monotonic()
                self._begin_traffic(During.JOB, During.FAULTS)
            if steps.done != done:
                done, progress_s = steps.done, time.monotonic()
            idle_s = self._limits.recovery_s * (RECOVERIES if injector.under_way else 1)
            if self._target.own and time.monotonic() > progress_s + idle_s:
                self._aborts.request(f"no step was made for {idle_s:g} s")
            if self._schedule.by_time and began_s is not None:
                played = not injector.is_alive()
                if time.monotonic() > began_s + length_s * (1.0 if played else self._limits.late):
                    return
            self._aborts.wait(_POLL_S)

    def _over(self) -> bool:
        with suppress(EtcdUnavailable):
            return self._target.reading().over
        return False

    def _reason(self, injector: FaultInjector) -> str:
        try:
            phase, alerts = self._target.reading().phase, self._target.alerts()
        except EtcdUnavailable:
            phase, alerts = None, []
        seen = [(alert, self._alerts.setdefault(alert.id, time.time())) for alert in alerts]
        self._alerts = {alert.id: at for alert, at in seen} or self._alerts
        return abort.reason(phase, seen, injector.over, injector.under_way.values())

    def _await_alerts(self) -> None:
        """Returns once all alerts have ended, or after so long that one that has not ended will not."""
        until = time.monotonic() + _ALERTS_END_S
        while time.monotonic() < until and not self._aborts.why:
            with suppress(EtcdUnavailable):
                if all(alert.phase is Phase.RESOLVED or not alert.notify_resolved for alert in self._target.alerts()):
                    return
            self._aborts.wait(_POLL_S)

    def _await_leases(self) -> None:
        """Returns once nobody holds anything of the job, or after so long that every lease of a process that has ended
        has ended too: what is there then is left for good."""
        until, left = time.monotonic() + self._target.cfg.dcs.pin_ttl_s + _LEASES_END_S, list[str]()
        while not self._aborts.why:
            with suppress(EtcdUnavailable):
                if not (left := self._target.unowned()):
                    return
            if time.monotonic() > until:
                break
            self._aborts.wait(_POLL_S)
        for key in left[:_MOST_KEYS] if not self._aborts.why else ():
            self._log.write(Kind.LEFTOVER, what=f"the key {key}, whose owner has ended,")

    def _phase(self) -> str:
        phase = self._target.reading().phase
        return phase.value if phase is not None else ""

    def _on_gap(self, first: int, last: int) -> None:
        self._log.write(Kind.GAP, first=first, last=last)
        with self._lock:
            self._presence.gap({"first": first, "last": last})

    def _on_present(self, found: Mapping[str, Any]) -> None:
        with self._lock:
            self._presence.present({"at": time.time(), **found})
        if "key" in found:
            self._write_change(Kind.PRESENT, found)
        else:
            self._log.write(Kind.PRESENT, **found)

    def _on_change(self, change: Mapping[str, Any]) -> None:
        with self._lock:
            self._presence.see({"at": time.time(), **change})
        self._write_change(Kind.CHANGE, change)

    def _write_change(self, kind: Kind, change: Mapping[str, Any]) -> None:
        if change["key"].startswith(self._target.observed) and not change["key"].startswith(self._secret):
            of_job = change["key"].startswith(self._target.cluster_keys.jobs_prefix())
            if change["key"] == self._target.keys.job_spec():
                change = without_secrets(change)
            self._log.write(kind, **(without_seal(change) if of_job else change))

    def _sample_processes(self) -> None:
        for sample in self._sampler.processes():
            self._log.write(Kind.PROCESS, **sample)

    def _sample_store(self) -> None:
        self._log.write(Kind.STORE, **self._sampler.store())


def _answered(read: Callable[[], T], until: float) -> T | None:
    """What is read, once etcd answers; None where it does not by then, of the monotonic clock: the rest is worth
    judging."""
    def waiting(error: EtcdUnavailable) -> None:
        if time.monotonic() >= until:
            raise error

    try:
        return patiently(read, away=EtcdUnavailable, pauses_s=(_POLL_S, _POLL_S), pause=time.sleep, waiting=waiting)
    except EtcdUnavailable as e:
        log.warning("not read at the end of the run: %s", e)
        return None


def _end(traffic: Traffic, mark: int | None) -> None:
    """A watch has all changes up to ``mark``, where that is known, before it ends."""
    try:
        if mark is not None and isinstance(traffic, Watcher):
            traffic.await_revision(mark)
    finally:
        traffic.close()


def _end_observer(observer: Observer, mark: int | None) -> None:
    try:
        if mark is not None:
            observer.await_revision(mark)
    finally:
        observer.close()
