"""Checkers of what happened around faults: whether they happened, were noticed and are over, what was said of them, and
what happened although there was none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from chaos_tests.event_log import Event, Kind
from chaos_tests.faults.catalogue import FAULTS, Part
from chaos_tests.model.models import MODELS
from chaos_tests.validate.attribution import (
    AFTER_S,
    NOT_OF_FAULTS,
    RESOLVED_S,
    SENDERS,
    Windows,
    attributed,
    began,
    ended,
    explains,
    happened,
    is_of_fault,
    may_restart_all,
    resolves_by,
    seen_in,
    struck,
    victim_is,
    victims,
)
from chaos_tests.validate.replay import KeyChange, Transaction, below, is_job
from chaos_tests.validate.running import RECOVERIES, RecoveryBounds
from chaos_tests.validate.times import Unseen
from chaos_tests.validate.training import COMPARED_SHARE, may_be_lost, same_weights
from chaos_tests.validate.verdict import OWN_TARGETS, RULES, RUN, Checker
from elastic_rl.coordinator.alerts.state_machine import Phase
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.job_records import ENDED_PHASES
from elastic_rl.etcd.keys import Keys

FLOOR_STEPS = 2
"""Steps that a job has to have done before its first fault, where the log does not say it: else nothing was struck
under load."""
_SILENT_S = 120.0
"""A job that makes no step for so long during a fault has to say what it waits for."""
_SAID_S = 10.0
"""Words that come closer to one another are one stretch."""
_NOTICE_S = 60.0
"""Longest from an alert's begin to its notice: receivers take so many a minute."""
_FIRST_S = 5.0
"""Longest from an alert's begin to its first notice: one that fires later before the end of a log may have none."""
_STATUS, _ALERTS = below(Keys("j").job_status()), below(Keys("j").alerts_prefix())
_MEMBERS = frozenset({Part.ENGINES, Part.TRAINER, Part.ROLES, Part.DRIVER, Part.COORDINATORS, Part.DCS})
"""Parts whose members are watched, so that one that is slow may be taken for lost."""


class FaultChecker(Checker):
    """Has the faults at the end."""

    reads: ClassVar[frozenset[Kind]] = frozenset({Kind.FAULT})
    lacks: ClassVar[str] = "no fault was injected"

    def __init__(self) -> None:
        super().__init__()
        self.faults = list[Event]()

    def see(self, event: Event) -> None:
        if event["kind"] == Kind.FAULT:
            self.faults.append(event)
        else:
            self.other(event)

    def other(self, event: Event) -> None:
        """A record that is no fault."""

    @property
    def happened(self) -> list[Event]:
        return [*filter(happened, self.faults)]


# -- what makes a run worth nothing ------------------------------------------------------------------------------------
class WorthSomething(FaultChecker):
    """The run went as it was planned, under load, and was watched: the log has all that was written to it, and what
    the job's steps have measured."""

    rule = RUN
    reads = frozenset(Kind)
    keys = ("",)
    lacks = "the log has no first record"

    def __init__(self) -> None:
        super().__init__()
        self._steps = list[tuple[float, int]]()
        """When each step was done first."""
        self._newest_step, self._compared, self._comparable = 0, 0, 0
        self._records, self._answers = Counter[str](), Counter[str]()
        """``_answers``: of clients, by the model that judges them."""

    def transaction(self, found: Transaction) -> None:
        self._records[Kind.CHANGE] += len(found.changes)

    def gap(self, first: int, last: int) -> None:
        self._records[Kind.GAP] += 1

    def see(self, event: Event) -> None:
        self._records[event["kind"]] += 1
        super().see(event)

    def other(self, event: Event) -> None:
        if event["kind"] == Kind.OPERATION:
            self._answers[str(event.get("model"))] += event.get("ended_s") is not None
        if event["kind"] != Kind.STEP:
            return
        self._compared += same_weights(event)
        self._comparable += event.get("staleness") == 0
        if event["step"] > self._newest_step:
            self._newest_step = int(event["step"])
            self._steps.append((float(event["at"]), int(event["step"])))

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        if end is None:
            self.violated("the log has no end: its writer was killed, or the run goes on")
        elif end.get("aborted"):
            self.violated(f"it was aborted: {end['aborted']}", end)
        elif self.run.get("target") in OWN_TARGETS and not (end.get("phase") and end.get("revision")):
            self.violated("it is not known how the job ended, or up to which revision: etcd did not answer then", end)
        if "watches" in (self.run.get("traffic") or ()) and not self._records[Kind.WATCH]:
            self.violated("no watch has seen anything")
        for problem in (end or {}).get("problems") or ():
            self.violated(f"the suite itself has failed: {problem}", end or {})
        missing = Counter((end or {}).get("records") or {}) - self._records
        for kind, count in sorted(missing.items()):
            self.violated(f"{count} records of {kind} are missing, of those that were written")
        self._planned()
        self._floor()
        missing_comparisons = self._comparable - self._compared
        if self._comparable and (not self._compared or missing_comparisons > may_be_lost(
                self._comparable, len(self.happened))):
            self.violated(f"{self._compared} of {self._comparable} steps on the newest weights compare the log-probs "
                          f"of engines with those of the trainer, below {COMPARED_SHARE:.0%}")

    def _planned(self) -> None:
        planned = Counter(str(name) for strike in (self.run.get("schedule") or {}).get("strikes") or ()
                          for name in strike["faults"])
        seen = Counter(str(fault["name"]) for fault in self.happened)
        for name, times in sorted((planned - seen).items()):
            of = [fault for fault in self.faults if fault["name"] == name and not happened(fault)]
            why = "; ".join(sorted({str(fault.get("problem")) for fault in of if fault.get("problem")}))
            self.violated(f"{name} was planned, and {times} of {planned[name]} did not happen"
                          f"{f': {why}' if why else ''}", *of)

    def _floor(self) -> None:
        floor: Mapping[str, int] = self.run.get("floor") or {"steps": FLOOR_STEPS}
        if self.happened and "steps" in floor:
            first = min(self.happened, key=began)
            done = sum(at < began(first) for at, _ in self._steps)
            if done < floor["steps"]:
                self.violated(f"{done} steps were done before the first fault, below {floor['steps']}", first)
        if self._answers.total() < floor.get("answers", 0):
            self.violated(f"clients had {self._answers.total()} answers, below {floor['answers']}")
        for model, least in floor.items():
            if model in MODELS and self._answers[model] < least:
                self.violated(f"clients of {model} had {self._answers[model]} answers, below {least}")

    def against(self, baseline: WorthSomething) -> None:
        if not baseline.run.get("baseline"):
            self.violated("the baseline is no run without faults", baseline.run)
        for name in ("scenario", "seed"):
            if baseline.run.get(name) != self.run.get(name):
                self.violated(f"the baseline has {name} {baseline.run.get(name)}, and the run {self.run.get(name)}")

    def evidence(self) -> str:
        if not self.run:
            return ""
        of = sum(len(strike["faults"]) for strike in (self.run.get("schedule") or {}).get("strikes") or ())
        return (f"{len(self.happened)} of {of} planned faults were seen to happen, {len(self._steps)} steps were done"
                + (f", clients had {answers} answers" if (answers := self._answers.total()) else ""))


# -- I10, I11 ----------------------------------------------------------------------------------------------------------
class Recoveries(FaultChecker):
    """Each fault that happened was detected, and then healed."""

    rule = "I10"

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        for fault in self.faults:
            if fault.get("breaks") in RULES:
                self.violated(f"{fault['name']} of {fault.get('target')}: {fault.get('problem')}", fault,
                              rule=str(fault["breaks"]))
        for fault in self.happened:
            if fault.get("breaks") in RULES:
                continue
            unnoticed = bool(fault.get("may_go_unnoticed")) and fault.get("detected_at") is None
            for moment, after in [("healed_at", "injected_at")] if unnoticed else [
                    ("detected_at", "injected_at"), ("healed_at", "detected_at")]:
                at, before = (float(math.nan if fault.get(m) is None else fault[m]) for m in (moment, after))
                if not at >= before:  # one of them is missing, too
                    problem = f": {fault['problem']}" if fault.get("problem") else ""
                    self.violated(f"{fault['name']} of {fault.get('target')} at step {fault.get('step')}: {moment} is "
                                  f"{fault.get(moment)}{problem}", fault)
                    break

    def evidence(self) -> str:
        healed = sum(fault.get("healed_at") is not None for fault in self.happened)
        return f"{healed} of {len(self.happened)} faults healed" if self.happened else ""


class SaidWhatItWaitsFor(FaultChecker):
    """A job that makes no step for long during a fault says what it waits for, and makes one within the time of two
    recoveries, and of one beside no fault; and the crash-loop rule ends no run that its faults did not end."""

    rule = "I11"
    reads = frozenset({Kind.FAULT, Kind.STEP, Kind.EVENT})
    keys = (_STATUS,)

    def __init__(self) -> None:
        super().__init__()
        self._gaps, self._last = list[tuple[float, float]](), 0.0
        self._bounds = RecoveryBounds()
        self._said = list[tuple[float, float]]()
        """Stretches in which the status said it; a gap of the observer is one, as it may have said it there."""
        self._unseen_since: float | None = None
        """The last step before a gap, until what is seen after it."""

    def begin(self, run: Event) -> None:
        super().begin(run)
        self._bounds.begin(run)

    def other(self, event: Event) -> None:
        if event["kind"] == Kind.STEP:
            at = float(event["at"])
            self._bounds.see(event)
            if self._last and at - self._last > _SILENT_S:
                self._gaps.append((self._last, at))
            self._last = max(self._last, at)
        elif event["kind"] == Kind.EVENT and event["name"] == event_kinds.RUN_CRASH_LOOP.name:
            self.violated(f"the crash-loop rule has ended the run: {event['message']}", event)

    def gap(self, first: int, last: int) -> None:
        """The job may have said it at any time until what is seen next."""
        self._unseen_since = self._last if self._unseen_since is None else self._unseen_since

    def transaction(self, found: Transaction) -> None:
        if self._unseen_since is not None:
            self._said.append((self._unseen_since, found.at))
            self._unseen_since = None
        if any(change.name == _STATUS and is_job(change) and change.new.get("waiting_for") for change in found.changes):
            self._words(found.at)

    def _words(self, at: float) -> None:
        if self._said and at - self._said[-1][1] < _SAID_S:
            self._said[-1] = (self._said[-1][0], max(at, self._said[-1][1]))
        else:
            self._said.append((at, at))

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        if self._unseen_since is not None:
            self._said.append((self._unseen_since, math.inf))
        for begin, until in self._gaps:
            during = [fault for fault in self.happened if began(fault) < until and float(
                fault.get("healed_at") or math.inf) > begin]
            most = self._bounds.recovery_s * (RECOVERIES if during else 1)
            if during and not any(first <= until and last >= begin for first, last in self._said):
                self.violated(f"no step was done for {until - begin:.0f} s, and the job did not say what it waits for",
                              *during)
            elif until - begin > most and self.run.get("target") in OWN_TARGETS:
                self.violated(f"no step was done for {until - begin:.0f} s, and the whole job had its first one after "
                              f"{self._bounds.start_s:.0f} s", *during)

    def evidence(self) -> str:
        if not self.happened:
            return ""
        return (f"{len(self._gaps)} pauses longer than {_SILENT_S:.0f} s; the job said {len(self._said)} times what it "
                f"waits for, beside {len(self.happened)} faults")


# -- I8 ----------------------------------------------------------------------------------------------------------------
class Leftovers(Checker):
    rule = "I8"
    reads = frozenset({Kind.LEFTOVER})
    lacks = "the cluster was not taken down within the log"

    def __init__(self) -> None:
        super().__init__()
        self._left = 0

    def see(self, event: Event) -> None:
        self._left += 1
        self.violated(f"{event['what']} is left", event)

    def evidence(self) -> str:
        looked = self.end is not None and self.run.get("target") in OWN_TARGETS
        return f"{self._left} things were left when the cluster had been taken down" if looked or self._left else ""


# -- I9 ----------------------------------------------------------------------------------------------------------------
@dataclass
class _Seen:
    """An alert as etcd had it."""

    alert: Event
    """Its record. Its own times are of the clock of the leader, which may be wrong."""
    since: float
    """When the observer saw it first, also while it was pending; -inf where there was the alert before."""
    fired_at: float = math.inf
    """When it saw it fire; inf where it did not."""
    reported_at: float = -math.inf
    """When it saw that what the alert says was reported, last."""
    resolved_at: float = math.inf
    silenced: bool = False
    """Whether its notices were held back at any time."""
    proofs: list[Event] = field(default_factory=list)

    @property
    def fired(self) -> bool:
        return self.fired_at < math.inf

    @property
    def as_observed(self) -> Event:
        return {**self.alert, "since": self.since, "resolved_at": self.resolved_at}


class Alerts(FaultChecker):
    """Each fault gives one alert, which ends with it, and receivers get the begin and the end of each alert once."""

    rule = "I9"
    reads = frozenset({Kind.FAULT, Kind.NOTIFICATION, Kind.STEP, Kind.STOP})
    keys = ("",)
    lacks = "no fault was injected, and no alert fired"

    def __init__(self) -> None:
        super().__init__()
        self._alerts = dict[str, _Seen]()
        self._notices = dict[tuple[str, str], list[Event]]()
        self._unseen, self._at = Unseen(), 0.0
        self._steps, self._stopped = list[float](), math.inf
        """When each step was done; when the job was asked to stop, or ended by itself: its alerts end with it."""

    def other(self, event: Event) -> None:
        if event["kind"] == Kind.NOTIFICATION:
            self._notices.setdefault((str(event["key"]), str(event["phase"])), []).append(event)
        elif event["kind"] == Kind.STEP:
            self._steps.append(float(event["at"]))
        elif event["kind"] == Kind.STOP:
            self._stopped = min(self._stopped, float(event["at"]))

    def gap(self, first: int, last: int) -> None:
        self._unseen.gap()

    def transaction(self, found: Transaction) -> None:
        self._unseen.seen(found.at)
        for change in found.changes:
            self._show(change, found.at, began=found.at if change.created else -math.inf)

    def present(self, change: KeyChange) -> None:
        at = float(change.event["at"])
        self._unseen.seen(at)
        self._show(change, at, began=-math.inf)

    def listed(self, listing: Event) -> None:
        self._unseen.seen(float(listing["at"]))

    def _show(self, change: KeyChange, at: float, *, began: float) -> None:
        """``began``: when an alert did that was not seen before."""
        self._at = at
        if change.name == _STATUS and is_job(change) and change.new.get("phase") in ENDED_PHASES:
            self._stopped = min(self._stopped, at)
        record = change.new
        if not change.name.startswith(_ALERTS) or not is_job(change) or not record.get("id"):
            return
        seen = self._alerts.setdefault(str(record["id"]), _Seen(record, began))
        if record.get("last_at") != seen.alert.get("last_at") or began > -math.inf:
            seen.reported_at = at
        seen.alert = record
        seen.silenced = seen.silenced or bool(record.get("silenced_by") or record.get("suppressed"))
        if record.get("phase") == Phase.FIRING and not seen.fired:
            seen.fired_at, seen.proofs = at, [change.event]
        seen.resolved_at = min(seen.resolved_at, at) if record.get("phase") == Phase.RESOLVED else math.inf

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        self._at_the_end(end)
        self._delivered(end)
        self._per_fault()

    def _at_the_end(self, end: Event | None) -> None:
        """Of the alerts of a job of others only those that began in the run are of its faults."""
        for alert in (end or {}).get("alerts") or ():
            seen = self._alerts.get(str(alert["id"]))
            of_run = self.run.get("target") in OWN_TARGETS or seen is not None and seen.since > -math.inf
            if alert["phase"] != Phase.RESOLVED and is_of_fault(alert) and of_run:
                self.violated(f"the alert {alert['kind']} of {alert['subject']} is {alert['phase']} at the end: "
                              f"{alert['message']}", alert)

    def _delivered(self, end: Event | None) -> None:
        """A notice is delivered at least once: one more time where the leader, or etcd, is lost between its sending and
        the record of it, and so between the notices."""
        losses = Windows(fault for fault in self.happened if not SENDERS.isdisjoint(struck(fault)))
        for (key, phase), notices in self._notices.items():
            first, last = (float(each["at"]) for each in (notices[0], notices[-1]))
            if len(notices) > 1 + losses.count(first - _NOTICE_S, last):
                self.violated(f"{phase} of the alert {notices[0]['alert']} of {notices[0]['subject']} was notified "
                              f"{len(notices)} times", *notices)
            if phase == Phase.RESOLVED and (key, Phase.FIRING) not in self._notices:
                self.violated(f"the end of the alert {notices[0]['alert']} of {notices[0]['subject']} was notified, "
                              "and not its begin", *notices)
        open_ = {str(alert["id"]) for alert in (end or {}).get("alerts") or () if alert["phase"] != Phase.RESOLVED}
        for (key, phase), notices in self._notices.items():
            known = self._alerts.get(key)
            if (end is not None and phase == Phase.FIRING and (key, Phase.RESOLVED) not in self._notices
                    and key not in open_ and known is not None and known.alert.get("notify_resolved")):
                self.violated(f"the begin of the alert {notices[0]['alert']} of {notices[0]['subject']} was notified, "
                              "and not its end", *notices)

        self._begins_notified(end)

    def _begins_notified(self, end: Event | None) -> None:
        """Each alert that fired was notified, but for those that fired when the run was about to end. The notices are
        written to the log with its end."""
        if end is None or not self._has_receivers:
            return
        missed, due = list[_Seen](), 0
        for key, seen in self._alerts.items():
            if seen.fired_at <= self._at - _FIRST_S and not seen.silenced:
                due += 1
                missed += [] if self._notified(key, seen.alert) else [seen]
        if missed and len(missed) == due:
            self.violated(f"{due} alerts fired, and no receiver got a notice", *missed[0].proofs)
            return
        for seen in missed:
            if seen.fired_at > self._at - _NOTICE_S:
                continue
            self.violated(f"the alert {seen.alert['kind']} of {seen.alert['subject']} has fired, and no receiver got a "
                          "notice of its begin", *seen.proofs)

    def _notified(self, key: str, alert: Event) -> bool:
        """Whether a notice was sent: by the run's own receiver, or by the record of the alert where the receivers are
        those of a job of others."""
        if self.run.get("target") in OWN_TARGETS:
            return (key, Phase.FIRING) in self._notices
        return any(str(entry).startswith(f"{Phase.FIRING}:") for entry in alert.get("notified") or ())

    def _per_fault(self) -> None:
        of = {str(seen.alert["id"]): seen for seen in self._alerts.values()
              if seen.fired and seen.since > -math.inf and is_of_fault(seen.alert)}
        happened = self.happened
        found, known = attributed((seen.as_observed for seen in of.values()), happened, sorted(self._steps)), {
            *map(id, happened)}
        self._resolved((of[str(alert["id"])], fault) for alert, fault in found.of)
        not_seen = Windows(fault for fault in self._tried if id(fault) not in known)
        seen_to_happen = Windows(happened)
        for alert in found.left_over:
            at = float(alert["since"])
            if not_seen.count(at - AFTER_S, at):
                continue
            names = ", ".join(str(fault["name"]) for fault in seen_to_happen.between(at - AFTER_S, at))
            why = f"beside the alerts that {names} may give" if names else "while no fault was under way"
            self.violated(f"{alert['kind']} of {alert['subject']} fired {why}", *of[str(alert["id"])].proofs)
        unseen = self._unseen.times()
        for fault in found.untold if self._alerts or self._has_receivers else ():
            if not unseen.meets(began(fault), ended(fault) + AFTER_S):
                self.violated(f"{fault['name']} of {fault.get('target')} gave no alert", fault)

    def _resolved(self, alerts: Iterable[tuple[_Seen, Event]]) -> None:
        """Each alert was resolved some time after its fault, and not just by the end of the job. One that fired before
        the job was to end is not judged where that time was not over by then."""
        if self.run.get("target") not in OWN_TARGETS:
            return
        unseen, faults, until = self._unseen.times(), Windows(self._tried), min(self._stopped, self._at)
        for seen, fault in alerts:
            due = resolves_by(seen.alert, max(seen.fired_at, seen.reported_at), fault, faults)
            if due < min(until, seen.resolved_at) and seen.alert.get("notify_resolved", True) and not (
                    unseen.meets(seen.fired_at, due)):
                self.violated(f"the alert {seen.alert['kind']} of {seen.alert['subject']} stayed open for "
                              f"{RESOLVED_S:.0f} s beside {fault['name']} and all that may keep it open", *seen.proofs,
                              fault)

    @property
    def _tried(self) -> list[Event]:
        """Faults that were begun, whether or not they were seen to happen."""
        return [fault for fault in self.faults if fault.get("injected_at") is not None]

    @property
    def _has_receivers(self) -> bool:
        return bool((self.settings.get("alerts") or {}).get("urls"))

    def evidence(self) -> str:
        fired = sum(seen.fired and is_of_fault(seen.alert) for seen in self._alerts.values())
        if not fired and not (self.happened and self._has_receivers):
            return ""
        return (f"{sum(map(victims, self.happened))} parts struck by {len(self.happened)} faults, {fired} alerts "
                f"fired, {sum(map(len, self._notices.values()))} notices received")


# -- I14 ---------------------------------------------------------------------------------------------------------------
class SlowWork(FaultChecker):
    """No fault is found, and nothing is restarted, where none was injected that strikes it."""

    rule = "I14"
    reads = frozenset({Kind.FAULT, Kind.EVENT, Kind.STEP})
    lacks = ("the log has no events of the product, or no fault that makes work slow and no time in which a loss would "
             "not pass for one that was injected")

    def __init__(self) -> None:
        super().__init__()
        self._found, self._events, self._steps = list[Event](), 0, list[float]()
        self._first_seen = dict[tuple[str, str], float]()
        """Component and subject of each event → when the first one was seen."""
        self._since, self._until = math.inf, -math.inf
        """When the first and the last event were seen."""
        self._unexcused_s, self._slow = 0.0, 0

    def other(self, event: Event) -> None:
        if event["kind"] == Kind.STEP:
            self._steps.append(float(event["at"]))
            return
        self._events += 1
        name, at = str(event["name"]), _seen_at(event)
        self._since, self._until = min(self._since, at), max(self._until, at)
        self._first_seen.setdefault((name.partition(".")[0], str(event["subject"])), at)
        kind = event_kinds.find(name)
        if kind is not None and (kind.begins or kind.counted) and not kind.ends and not kind.name.startswith(
                NOT_OF_FAULTS):  # the end of a fault comes as late as it will; its begin is judged
            self._found.append(event)

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        injected = [fault for fault in self.faults if fault.get("injected_at") is not None and seen_in(fault)]
        windows, steps = Windows(injected), sorted(self._steps)
        for event in self._found:
            at = _seen_at(event)
            under_way = [*windows.between(at - AFTER_S, at + 1.0)]
            if not self._explained(event, under_way, steps):
                when = "that strikes it " if under_way else ""
                self.violated(f"{event['name']} of {event['subject']}, when no fault {when}was under way: "
                              f"{event['message']}", event)
        self._slow = sum(fault["name"] in FAULTS and FAULTS[str(fault["name"])].slows for fault in self.happened)
        # A clock that was wrong may have written times that are not of the run.
        since = max(self._since, float(self.run.get("at", -math.inf)))
        self._unexcused_s = unexcused_s(injected, since, min(self._until, float((end or {}).get("at", math.inf))))

    def _explained(self, event: Event, under_way: list[Event], steps: list[float]) -> bool:
        if event["name"] == event_kinds.RUN_GLOBAL_RESTART.name:
            return may_restart_all(under_way, steps)
        return any(explains(fault, event) and victim_is(fault, event, self._first_seen) for fault in under_way)

    def evidence(self) -> str:
        if not self._events or not (self._slow or self._unexcused_s):
            return ""
        return (f"{self._events} events, of which {len(self._found)} are of faults; {self._slow} faults that slow, and "
                f"{self._unexcused_s:.0f} s in which the loss of some part was not excused")


def _seen_at(event: Event) -> float:
    """The clock of who has written it may be wrong."""
    return float(event.get("seen_at", event["at"]))


def unexcused_s(faults: Iterable[Event], since: float, until: float) -> float:
    """The seconds between two times in which the loss of any part of ``_MEMBERS`` was no sign of one of these faults.
    Pure."""
    edges = list[tuple[float, Part, int]]()
    for fault in faults:
        begin, end = max(since, began(fault) - 1.0), min(until, ended(fault) + AFTER_S)
        edges += [edge for part in seen_in(fault) & _MEMBERS if begin < end
                  for edge in ((begin, part, 1), (end, part, -1))]
    excused, total, at = Counter[Part](), 0.0, since
    if since >= until:
        return 0.0
    for moment, part, change in sorted(edges):
        total += moment - at if any(not excused[one] for one in _MEMBERS) else 0.0
        excused[part] += change
        at = moment
    return total + until - at


CHECKERS: tuple[type[Checker], ...] = (
    WorthSomething, Recoveries, SaidWhatItWaitsFor, Leftovers, Alerts, SlowWork)
