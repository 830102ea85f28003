"""Which fault an alert is a sign of. Pure.

Faults overlap, and their alerts come later. So each fault accounts for a limited number of alerts, of the parts that it
strikes and within a limited time; an alert that is left over is one too many.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from chaos_tests.event_log import Event
from chaos_tests.faults.catalogue import FAULTS, Part
from elastic_rl.config.groups import TRAINER_GROUPS
from elastic_rl.etcd.records import Severity
from elastic_rl.faults.context import ENDED_BY_SIGTERM, EXITED_WITH_0, SENT_SIGKILL

AFTER_S = 60.0
"""Consequences of a fault come so long after its recovery at most: leases end, and alerts have a hold."""
_ENDED = (SENT_SIGKILL, ENDED_BY_SIGTERM, EXITED_WITH_0)
"""What the witness of a fault says of a process that has ended by it."""
NOT_OF_FAULTS = ("eval.", "responses.", "reward.", "generate.", "filter.", "train.", "job.", "alerts.", "operation.",
                  "restart.requested", "pool.scaling", "samples.")
"""Begins of the kinds of alerts that are about what is trained, or what an operator asked for."""
_CONSEQUENCES = ("compute.", "dcs.under_replicated", "durable.", "engine.cannot_fetch", "engine.lagging",
                 "leader.absent", "pool.short", "reconcile.failing", "record.unreadable", "run.global_restart",
                 "run.waiting", "staleness.exceeded")
"""Begins of the kinds of alerts that tell how a fault goes on, which any fault may have where it lasts."""
_MOST_CONSEQUENCES = 4
"""Alerts of ``_CONSEQUENCES`` that one fault may have in all."""
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
_KNOWN = frozenset(part.value for part in Part)
_OF_EACH_HOST = frozenset({Part.COORDINATORS, Part.DCS, Part.HOSTS})
"""Parts that each host has, and that go on where another host is lost. The target of a fault of a host names its own;
of its member of etcd it has the address, which no event names."""


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
    the event says how a fault goes on, of any that takes something away. Of what each host has, the fault of one host
    is the reason where it names it."""
    if not (seen := seen_in(fault)):
        return False
    if str(event["name"]).startswith(_CONSEQUENCES) or names(fault, str(event["subject"])):
        return True
    of = parts(str(event["name"]))
    return bool(of & seen) and not (Part.HOSTS in struck(fault)[:1] and of <= _OF_EACH_HOST)


def names(fault: Event, subject: str) -> bool:
    """Whether the target of a fault has the subject as a word."""
    return bool(subject) and subject in re.split(r"[\s,()/]+", str(fault.get("target")))


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
    consequences: set[tuple[str, str]] = field(default_factory=set)
    """(kind, subject) of those that it has given."""

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

    def takes(self, alert: Event) -> bool:
        """Accounts for an alert, if it may."""
        kind, subject = str(alert["kind"]), str(alert["subject"])
        if kind.startswith(_CONSEQUENCES):
            fits = len(self.consequences) < _MOST_CONSEQUENCES and (kind, subject) not in self.consequences
            if fits:
                self.consequences.add((kind, subject))
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


def attributed(alerts: Iterable[Event], faults: Iterable[Event]) -> Attribution:
    """``alerts``: the records of those that fired; ``faults``: those that happened. Of the faults that may account for
    an alert it is one that names its subject, or one of just this part, or one that has to give an alert, or the one
    whose time is over first, so that the others are left for later alerts."""
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
        account = next((account for account in found if account.takes(alert)), None)
        if account is None:
            left_over.append(alert)
        else:
            pairs.append((alert, account.fault))
    told = {id(fault) for _, fault in pairs}
    untold = [account.fault for account in accounts if id(account.fault) not in told and gives_alert(account.fault)
              and not any(_was_open(alert, account) for alert in alerts)]
    return Attribution(pairs, left_over, untold)


def _was_open(alert: Event, account: _Account) -> bool:
    """Whether an alert about a part that a fault struck was open when it was struck: signs of one part that does not
    work are one alert."""
    over = float(alert.get("resolved_at") or math.inf)
    return (account.is_main(str(alert["kind"]))
            and float(alert["since"]) <= began(account.fault) + _FOUND_S and over >= began(account.fault))
