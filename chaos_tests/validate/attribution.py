"""Which fault an alert is a sign of. Pure.

Faults overlap, and their alerts come later. So each fault accounts for a limited number of alerts, of the parts that it
strikes and within a limited time; an alert that is left over is one too many.
"""

from __future__ import annotations

import heapq
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from chaos_tests.event_log import Event
from chaos_tests.faults.catalogue import FAULTS, Part
from elastic_rl.config.groups import TRAINER_GROUPS
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.records import Severity
from elastic_rl.faults.context import ENDED_BY_SIGTERM, EXITED_WITH_0, SENT_SIGKILL

AFTER_S = 60.0
"""Consequences of a fault come so long after its recovery at most: leases end, and alerts have a hold."""
_ENDED = (SENT_SIGKILL, ENDED_BY_SIGTERM, EXITED_WITH_0)
"""What the witness of a fault says of a process that has ended by it."""
NOT_OF_FAULTS = ("eval.", "responses.", "reward.", "generate.", "filter.", "train.", "job.", "alerts.", "operation.",
                  "restart.requested", "pool.scaling", "samples.", "update.")
"""Begins of the kinds of alerts that are about what is trained, or what an operator asked for."""
_GLOBAL_RESTART = event_kinds.RUN_GLOBAL_RESTART.name
_COMPUTE = frozenset({Part.ENGINES, Part.TRAINER, Part.ROLES, Part.DRIVER, Part.ROUTER, Part.RUN, Part.RAY, Part.HOSTS,
                      Part.ETCD})
"""What the driver keeps running, and what it runs on; without etcd a host ends its driver."""
_CONSEQUENCES: Mapping[str, frozenset[Part]] = {
    "compute.": _COMPUTE, "dcs.under_replicated": frozenset({Part.DCS, Part.HOSTS, Part.ETCD}),
    "durable.": frozenset({Part.DCS, Part.HOSTS, Part.ETCD}),
    "engine.cannot_fetch": frozenset({Part.ENGINES, Part.DCS, Part.HOSTS, Part.ETCD}),
    # How old a version is says the clock of its publisher or of the leader; the driver and Ray start engines.
    "engine.lagging": frozenset({Part.ENGINES, Part.DCS, Part.TRAINER, Part.COORDINATORS, Part.DRIVER, Part.RUN,
                                 Part.RAY, Part.HOSTS, Part.ETCD}),
    "leader.absent": frozenset({Part.COORDINATORS, Part.HOSTS, Part.ETCD}),
    # An engine that starts loads from DCS nodes; a leader whose clock is ahead finds that it takes too long.
    "pool.short": frozenset({Part.ENGINES, Part.DCS, Part.COORDINATORS, Part.DRIVER, Part.RUN, Part.RAY, Part.HOSTS,
                             Part.ETCD}),
    "reconcile.failing": frozenset({Part.COORDINATORS, Part.HOSTS, Part.ETCD}),
    "record.unreadable": frozenset({Part.ETCD}),
    "run.waiting": _COMPUTE | {Part.DCS},
    "staleness.exceeded": _COMPUTE | {Part.DCS}}
"""Begins of the kinds of alerts that tell how a fault goes on → the parts whose faults may go on so. A global restart
is none of them (``may_restart_all``)."""
_SEVERAL: Mapping[tuple[str, str], int] = {("foreign_records", "record.unreadable"): 3}
"""(Fault, kind of alert): how many of a kind of consequence it may have, where it is not one: of the records of other
releases three are no records to this one, and each is an alert."""
_IN_A_ROW = frozenset({Part.TRAINER, Part.ROLES, Part.DRIVER})
"""Parts whose faults without a step in between lead to a global restart (``coordinator.failure.policy``)."""
_FOUND_S = 10.0
"""An alert that opens so long after a fault may be about it and the fault before it: both are found with it."""
_PARTS: Mapping[str, frozenset[Part]] = {
    **dict.fromkeys(TRAINER_GROUPS, frozenset({Part.TRAINER})), "trainer": frozenset({Part.TRAINER}),
    "publish": frozenset({Part.TRAINER, Part.DCS}), "engine": frozenset({Part.ENGINES}),
    "coordinator": frozenset({Part.COORDINATORS}), "leader": frozenset({Part.COORDINATORS, Part.ETCD}),
    "dcs": frozenset({Part.DCS}), "driver": frozenset({Part.DRIVER}), "run": frozenset({Part.DRIVER, Part.RUN}),
    "router": frozenset({Part.ROUTER, Part.DRIVER}), "etcd": frozenset({Part.ETCD}), "compute": frozenset({Part.RAY}),
    "host": frozenset({Part.HOSTS}), "queue": frozenset({Part.ROLES})}
"""Component of an alert's kind → the parts whose loss gives it; a component that is not here is a role."""
SENDERS = frozenset({Part.COORDINATORS, Part.ETCD, Part.HOSTS})
"""Parts without which no alert resolves, and a notice is not sent, or not recorded as sent."""
_KNOWN = frozenset(part.value for part in Part)
_OF_EACH_HOST = frozenset({Part.COORDINATORS, Part.DCS, Part.HOSTS})
"""Parts that each host has, and that go on where another host is lost. The target of a fault of a host names its own;
of its member of etcd it has the address, which no event names."""


def happened(fault: Event) -> bool:
    """Whether it was seen to happen; what has found a broken rule has happened."""
    return bool(fault.get("witness") or fault.get("breaks")) and fault.get("injected_at") is not None


def began(fault: Event) -> float:
    return float(fault["injected_at"])


def ended(fault: Event) -> float:
    """When it was over; inf where it was not."""
    return float(fault["healed_at"]) if fault.get("healed_at") is not None else math.inf


def under_way(fault: Event, at: float) -> bool:
    """Whether the fault was under way, or over since ``AFTER_S`` at most."""
    return began(fault) <= at <= ended(fault) + AFTER_S


def victims(fault: Event) -> int:
    """Processes that one fault has killed at once; each is a fault to the cluster."""
    return max(1, str(fault.get("witness")).count(SENT_SIGKILL))


def is_of_fault(alert: Event) -> bool:
    """Whether an alert is about a part that does not work."""
    return alert.get("severity") != Severity.INFO and not str(alert.get("kind")).startswith(NOT_OF_FAULTS)


def gives_alert(fault: Event) -> bool:
    """Whether an alert has to tell of it: a process has ended by it, or what it struck does not go on by itself, and is
    nothing that is replaced unnoticed."""
    entry = FAULTS.get(str(fault["name"]))
    return (entry is None or not entry.repaired_unseen) and (
        fault.get("may_go_unnoticed") is False or any(how in str(fault.get("witness")) for how in _ENDED))


def struck(fault: Event) -> Sequence[Part]:
    """The parts that a fault strikes, the one that it is a fault of first. A record of an earlier release does not say
    it, and the catalogue does; of a fault that neither knows, none."""
    return _of_record(fault, "parts")


def seen_in(fault: Event) -> frozenset[Part]:
    """The parts whose losses a fault may be the reason for; otherwise as ``struck``."""
    return frozenset(_of_record(fault, "seen_in"))


def _of_record(fault: Event, name: str) -> Sequence[Part]:
    known = fault.get(name)
    if known is None:
        entry = FAULTS.get(str(fault["name"]))
        known = entry.fields[name] if entry is not None else ()
    return [Part(part) for part in known if part in _KNOWN]


def explains(fault: Event, event: Event) -> bool:
    """Whether a fault may be the reason for an event of the product: it is seen in its part, or names its subject; or
    the event says how a fault of such a part goes on. Of what each host has, the fault of one host is the reason where
    it names it. A global restart has other reasons, too (``may_restart_all``)."""
    kind = str(event["name"])
    if not (seen := seen_in(fault)):
        return False
    if kind == _GLOBAL_RESTART:
        return _restarts_all(fault)
    if names(fault, str(event["subject"])) or (causes := _causes(kind)) & _reached(fault):
        return True
    if causes:
        return False
    of = parts(kind)
    return bool(of & seen) and not (Part.HOSTS in struck(fault)[:1] and of <= _OF_EACH_HOST)


def _causes(kind: str) -> frozenset[Part]:
    """The parts whose faults may go on with an alert of a kind; none: it does not tell how a fault goes on."""
    return next((causes for begin, causes in _CONSEQUENCES.items() if kind.startswith(begin)), frozenset())


def _reached(fault: Event) -> frozenset[Part]:
    """The parts that a fault strikes or takes with it; of a fault that nobody knows, any."""
    return frozenset(struck(fault)) | seen_in(fault) or frozenset(Part)


def _restarts_all(fault: Event) -> bool:
    """Whether the whole compute plane may be rebuilt for a fault alone; of one that is not in the catalogue, it may."""
    entry = FAULTS.get(str(fault["name"]))
    return entry is None or entry.restarts_all


def may_restart_all(faults: Iterable[Event], steps: Sequence[float]) -> bool:
    """Whether these faults may be the reason for a global restart: one of them alone, or several of one part without a
    step in between. What the driver ends counts with any part: it does not carry out the restart of that part then.
    ``steps``: when each was done, in their order."""
    of = sorted(faults, key=began)
    if any(_restarts_all(fault) or victims(fault) > 1 and struck(fault)[0] is Part.DRIVER for fault in of):
        return True
    for part in _IN_A_ROW:
        of_part = [began(fault) for fault in of if not {part, Part.DRIVER}.isdisjoint(struck(fault))]
        if any(bisect_left(steps, one) == bisect_left(steps, next_) for one, next_ in pairwise(of_part)):
            return True
    return False


def names(fault: Event, subject: str) -> bool:
    """Whether the target of a fault has the subject as a word."""
    return bool(subject) and subject in _words(fault)


def _words(fault: Event) -> Sequence[str]:
    return re.split(r"[\s,()/]+", str(fault.get("target")))


@dataclass
class _Account:
    """What a fault may still account for."""

    fault: Event
    main: frozenset[Part]
    """The part that it is a fault of; of a fault that is not in the catalogue, any."""
    also: frozenset[Part]
    """Parts that it takes with it."""
    left: int
    """Alerts of ``main`` that it may still give."""
    role: str = ""
    """The role whose member it ends, of the roles of a job; "": any, or none."""
    others: set[tuple[str, str]] = field(default_factory=set)
    """Components, with the subject, that had their alert."""
    consequences: Counter[str] = field(default_factory=Counter)
    """Kinds of those that it has given."""

    @classmethod
    def of(cls, fault: Event) -> _Account:
        of = struck(fault)
        if not of:
            return cls(fault, frozenset(Part), frozenset(), victims(fault))
        entry = FAULTS.get(str(fault["name"]))
        return cls(fault, frozenset(of[:1]), frozenset(of[1:]), max(1, victims(fault) - len(of[1:])),
                   entry.loses if entry is not None and of[0] is Part.ROLES else "")

    def is_main(self, kind: str) -> bool:
        """Whether an alert of a kind is about the part that it is a fault of."""
        return bool(parts(kind) & self.main) and self.role in ("", kind.partition(".")[0])

    def takes(self, alert: Event, restarted_all: bool) -> bool:
        """Accounts for an alert, if it may. ``restarted_all``: whether the faults of then may be the reason for a
        global restart."""
        kind, subject = str(alert["kind"]), str(alert["subject"])
        if kind == _GLOBAL_RESTART or (causes := _causes(kind)):
            fits = (restarted_all and (_restarts_all(self.fault) or not _IN_A_ROW.isdisjoint(struck(self.fault)))
                    if kind == _GLOBAL_RESTART else bool(causes & _reached(self.fault)))
            fits = fits and self.consequences[kind] < _SEVERAL.get((str(self.fault["name"]), kind), 1)
            self.consequences[kind] += fits
            return fits
        of, one = parts(kind), (kind.partition(".")[0], subject)
        is_main = self.is_main(kind)
        if not is_main and of & self.also and one not in self.others:  # what is left is for the main part
            self.others.add(one)
            return True
        if self.left and (is_main or (one not in self.others and names(self.fault, subject))):
            self.left -= 1
            self.others.add(one)
            return True
        return False


def parts(kind: str) -> frozenset[Part]:
    """The parts whose loss gives an alert, or an event, of a kind."""
    return _PARTS.get(kind.partition(".")[0], frozenset({Part.ROLES}))


@dataclass(frozen=True)
class Attribution:
    of: Sequence[tuple[Event, Event]]
    """(alert, the fault that it is a sign of)."""
    left_over: Sequence[Event]
    """Alerts that no fault accounts for."""
    untold: Sequence[Event]
    """Faults that ended a process, and of which no alert told: none was given, and none about such a part was open."""


def attributed(alerts: Iterable[Event], faults: Iterable[Event], steps: Sequence[float] = ()) -> Attribution:
    """``alerts``: the records of those that fired; ``faults``: those that happened; ``steps``: when each was done, in
    their order. Of the faults that may account for an alert it is one that names its subject, or one of just this part,
    or one that has to give an alert, or the one whose time is over first, so that the others are left for later
    alerts."""
    accounts = [_Account.of(fault) for fault in faults]
    pairs, left_over = list[tuple[Event, Event]](), list[Event]()
    alerts = sorted(alerts, key=lambda alert: float(alert["since"]))
    later, now = deque(sorted(accounts, key=lambda account: began(account.fault))), list[_Account]()
    for alert in alerts:
        at = float(alert["since"])
        while later and began(later[0].fault) <= at:
            now.append(later.popleft())
        now = [account for account in now if under_way(account.fault, at)]  # no later alert is of the others
        found = sorted(now, key=lambda account: (
            not names(account.fault, str(alert["subject"])), not account.is_main(str(alert["kind"])),
            not gives_alert(account.fault), ended(account.fault)))
        restarted = alert["kind"] == _GLOBAL_RESTART and may_restart_all((one.fault for one in now), steps)
        account = next((account for account in found if account.takes(alert, restarted)), None)
        if account is None:
            left_over.append(alert)
        else:
            pairs.append((alert, account.fault))
    told = {id(fault) for _, fault in pairs}
    silent = [account for account in accounts if id(account.fault) not in told and gives_alert(account.fault)]
    return Attribution(pairs, left_over, _untold(silent, pairs, left_over))


def _untold(silent: Iterable[_Account], pairs: Iterable[tuple[Event, Event]], left_over: Iterable[Event]
            ) -> list[Event]:
    """The faults without an alert about whose part none was open either when they struck: signs of one part that does
    not work are one alert. It is such a sign while what it is attributed to is under way, or was over a little before:
    an alert that stays open for good tells of nothing."""
    last = [(alert, ended(fault) + AFTER_S) for alert, fault in pairs]
    last += [(alert, float(alert["since"]) + AFTER_S) for alert in left_over]
    last.sort(key=lambda one: float(one[0]["since"]))
    untold, open_, at = list[Event](), list[tuple[Event, float]](), 0
    for account in sorted(silent, key=lambda account: began(account.fault)):
        struck_at = began(account.fault)
        while at < len(last) and float(last[at][0]["since"]) <= struck_at + _FOUND_S:
            open_.append(last[at])
            at += 1
        open_ = [(alert, until) for alert, until in open_  # no later fault is told of by the others
                 if min(until, float(alert.get("resolved_at") or math.inf)) >= struck_at]
        tells = [account.is_main(str(alert["kind"])) for alert, _ in open_]
        if not any(tells):
            untold.append(account.fault)
        open_ = [(alert, max(until, ended(account.fault) + AFTER_S) if told else until)
                 for (alert, until), told in zip(open_, tells, strict=True)]
    return untold


class Windows:
    """Faults by their times. A look costs as much as is under way then, however long the run was."""

    def __init__(self, faults: Iterable[Event]) -> None:
        of = sorted(faults, key=began)
        self._lasting = [fault for fault in of if ended(fault) == math.inf]
        self._over = [fault for fault in of if ended(fault) < math.inf]
        self._begins, self._ends = sorted(map(began, of)), sorted(map(ended, of))
        self._over_until = [*accumulate(map(ended, self._over), max)]

    def count(self, since: float, until: float) -> int:
        """How many were under way at any time between these two."""
        return bisect_right(self._begins, until) - bisect_left(self._ends, since)

    def between(self, since: float, until: float) -> Iterator[Event]:
        """Those that were under way at any time between these two, by their begin."""
        later = range(bisect_left(self._over_until, since), len(self._over))
        for fault in heapq.merge(self._lasting, (self._over[n] for n in later), key=began):
            if began(fault) > until:
                return
            if ended(fault) >= since:
                yield fault


RESOLVED_S = 180.0
"""An alert resolves so long after the recovery of its fault at most: its last report may come ``AFTER_S`` after that,
one whose end nothing announces is over another minute later (``coordinator.alerts.rules.QUIET_S``), and a leader may
have to be elected first."""


def resolves_by(alert: Event, reported_at: float, fault: Event, faults: Windows) -> float:
    """When an alert has to be resolved that a fault accounts for: ``RESOLVED_S`` after the recovery, not counting the
    time of faults that may keep it open. Without a leader nothing resolves, either. An alert that stays open for good
    is so found among faults, too, that follow one another closely. ``reported_at``: when it fired, or what it says was
    reported again."""
    event = {"name": alert["kind"], "subject": alert["subject"]}
    at = max(ended(fault), reported_at)
    until = at + RESOLVED_S
    for other in faults.between(at, math.inf):
        if began(other) >= until:
            break
        if ended(other) > at and (explains(other, event) or not SENDERS.isdisjoint(struck(other))):
            until += ended(other) - max(at, began(other))
            at = ended(other)
    return until


def victim_is(fault: Event, event: Event, first_seen: Mapping[tuple[str, str], float]) -> bool:
    """Whether a loss may be of the victim of a fault, or of its successor, where the record of the fault names a victim
    that events have told of; else of any. The ranks of a group fail together. ``first_seen``: the component and the
    subject of each event → when the first one was seen."""
    kind, subject = str(event["name"]), str(event["subject"])
    component = kind.partition(".")[0]
    if component in TRAINER_GROUPS or _causes(kind) or not parts(kind) & frozenset(struck(fault)[:1]):
        return True
    named = {word for word in _words(fault) if (component, word) in first_seen}
    return not named or subject in named or first_seen[component, subject] >= began(fault) - 1.0
