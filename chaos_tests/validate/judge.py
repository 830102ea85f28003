"""The verdict on every rule over one event log, and the registry of the checkers that it comes from. Pure.

A new checker is a class in ``CHECKERS`` of its module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate import (
    assignments,
    ending,
    faults,
    fencing,
    groups,
    growth,
    histories,
    leadership,
    lifecycles,
    recoveries,
    running,
    training,
    versions,
    watches,
    weights,
)
from chaos_tests.validate.replay import Replay
from chaos_tests.validate.verdict import MOST_SHOWN, RULES, RUN, Checker, State, Verdict, Violation

OF_STORE: Sequence[type[Checker]] = (
    *watches.CHECKERS, *leadership.CHECKERS, *fencing.CHECKERS, *assignments.CHECKERS, *versions.CHECKERS,
    *lifecycles.CHECKERS, *groups.CHECKERS)
"""The checkers that judge any history of etcd, also one of parts without a job."""
CHECKERS: Sequence[type[Checker]] = (
    *faults.CHECKERS, *recoveries.CHECKERS, *training.CHECKERS, *weights.CHECKERS, *OF_STORE, *running.CHECKERS,
    *ending.CHECKERS, *histories.CHECKERS, *growth.CHECKERS)


def judge(events: Iterable[Event], baseline: Iterable[Event] | None = None) -> list[Verdict]:
    """A verdict on each of ``RULES``, in their order.

    ``events``: the records of a log, which are read once and not held. ``baseline``: the log of the run without faults.
    """
    told = _Told(events)
    if baseline is None and next(iter(told.checkers)).run.get("compares"):
        told.extra.append(Violation(RUN, "the log of the same job without faults, which it is compared with, is not "
                                         "there"))
    if baseline is not None:
        its = _Told(baseline)
        for checker, other in zip(told.checkers, its.checkers, strict=True):
            checker.against(other)
        for verdict in its.verdicts():
            if verdict.state is State.VIOLATED:
                told.extra += [Violation(RUN, f"the baseline: {v}", v.records) for v in verdict.violations]
    return told.verdicts()


def show(events: Iterable[Event], checkers: Sequence[Checker]) -> None:
    """Shows the records of a log to checkers."""
    by_kind = {kind: [checker for checker in checkers if kind in checker.reads] for kind in Kind}
    replay, end = Replay(checkers), None
    for event in events:
        kind = event["kind"]
        if kind == Kind.CHANGE:
            replay.change(event)
        elif kind == Kind.GAP:
            replay.gap(event)
        elif kind == Kind.PRESENT:
            replay.present(event)
        elif kind == Kind.RUN:
            for checker in checkers:
                checker.begin(event)
        elif kind == Kind.END:
            end = event
        else:
            for checker in by_kind.get(kind, ()):
                checker.see(event)
    replay.flush()
    for checker in checkers:
        checker.finish(end)


def broken(events: Iterable[Event], checkers: Iterable[type[Checker]] = OF_STORE) -> list[Violation]:
    """What checkers say of records that may be no whole log."""
    made = [checker() for checker in checkers]
    show(events, made)
    return [violation for checker in made for violation in checker.violations]


class _Told:
    """What all checkers say of one log."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.checkers = [make() for make in CHECKERS]
        self.extra = list[Violation]()
        show(events, self.checkers)

    def verdicts(self) -> list[Verdict]:
        found = {rule: self._verdict(rule) for rule in RULES if rule != RUN}
        must_see = next(checker.run for checker in self.checkers).get("must_see") or ()
        self.extra += [Violation(RUN, f"{rule} is unseen, and this scenario has to show it: {found[rule].evidence}")
                       for rule in must_see if rule in found and found[rule].state is State.UNSEEN]
        return [found.get(rule) or self._verdict(rule) for rule in RULES]

    def _verdict(self, rule: str) -> Verdict:
        of_rule = [checker for checker in self.checkers if checker.rule == rule]
        said = [violation for checker in self.checkers for violation in checker.violations]
        found = [violation for violation in (*said, *self.extra) if violation.rule == rule]
        seen = [words for checker in of_rule if (words := checker.evidence())]
        further = sum(checker.further for checker in of_rule) + max(0, len(found) - MOST_SHOWN)
        if found:
            return Verdict(rule, State.VIOLATED, "; ".join(seen) or "as the violations say", tuple(found[:MOST_SHOWN]),
                           further)
        if seen:
            return Verdict(rule, State.KEPT, "; ".join(seen))
        return Verdict(rule, State.UNSEEN, "; ".join(dict.fromkeys(checker.lacks for checker in of_rule)))
