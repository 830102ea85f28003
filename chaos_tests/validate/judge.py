"""The verdict on every rule over one event log, and the registry of the checkers that it comes from. Pure.

A new checker is a ``Fold`` in ``FOLDS``, or a function of all records in ``REPLAYS``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate import faults, growth, replays, store, training, watches
from chaos_tests.validate.histories import unexplained
from chaos_tests.validate.verdict import MOST_SHOWN, RULES, RUN, Fold, Replay, State, Verdict, Violation

FOLDS: Sequence[type[Fold]] = (
    faults.WorthSomething, store.FencingNumbers, store.CompleteVersions, store.VersionNumbers,
    training.CommittedVersions, training.TrueWeights, training.NamedVersions, training.TrainedOnce, store.PoolSizes,
    training.SameAsBaseline, faults.Leftovers, faults.Alerts, faults.Recoveries, store.EndedOperations,
    training.WholeRun, faults.SaidWhatItWaitsFor, store.Singletons, store.Decisions, faults.SlowWork,
    store.KeptAfterStop, growth.NothingGrows)
REPLAYS: Sequence[Replay] = (
    Replay(("I1",), Kind.CHANGE, store.stale_leaders, "the election replayed"),
    Replay(("I1", "I3", "I10"), Kind.OPERATION, unexplained, "histories of clients against their models"),
    *(Replay((rule,), Kind.WATCH if checker is watches.watches else Kind.CHANGE, checker,
             " ".join((checker.__doc__ or "").partition(".")[0].split()))
      for rule, checker in replays.CHECKERS))


def judge(events: Iterable[Event], baseline: Iterable[Event] | None = None) -> list[Verdict]:
    """A verdict on each of ``RULES``, in their order.

    ``events``: the records of a log. Where they can be iterated over again (``event_log.Records``) they are read once
    by all folds together and once for each replay, and are not held. ``baseline``: the log of the run without faults.
    """
    told = _Told(events)
    if baseline is not None:
        its = _Told(baseline)
        for fold, other in zip(told.folds, its.folds, strict=True):
            fold.against(other)
        for verdict in its.verdicts():
            if verdict.state is State.VIOLATED:
                told.extra += [Violation(RUN, f"the baseline: {v}", v.records) for v in verdict.violations]
    return told.verdicts()


class _Told:
    """What all checkers say of one log."""

    def __init__(self, events: Iterable[Event]) -> None:
        again = events if iter(events) is not events else tuple(events)
        self.folds, self.counts = [make() for make in FOLDS], defaultdict[str, int](int)
        self.extra = list[Violation]()
        by_kind = {kind: [fold for fold in self.folds if kind in fold.reads] for kind in Kind}
        end: Event | None = None
        for event in again:
            kind = event["kind"]
            self.counts[kind] += 1
            if kind == Kind.RUN:
                for fold in self.folds:
                    fold.begin(event)
            elif kind == Kind.END:
                end = event
            else:
                for fold in by_kind.get(kind, ()):
                    fold.see(event)
        for fold in self.folds:
            fold.finish(end)
        self.replayed = [violation for replay in REPLAYS if self.counts[replay.reads]
                         for violation in replay.find(again)]

    def verdicts(self) -> list[Verdict]:
        return [self._verdict(rule) for rule in RULES]

    def _verdict(self, rule: str) -> Verdict:
        folds = [fold for fold in self.folds if fold.rule == rule]
        replays = [replay for replay in REPLAYS if rule in replay.rules]
        found = [*(violation for fold in folds for violation in fold.violations),
                 *(violation for violation in (*self.replayed, *self.extra) if violation.rule == rule)]
        by_kind = defaultdict[Kind, list[str]](list)
        for replay in replays:
            if self.counts[replay.reads]:
                by_kind[replay.reads].append(replay.what)
        seen = [*(words for fold in folds if (words := fold.evidence())),
                *(f"{self.counts[kind]:,} {kind}s: {'; '.join(what)}" for kind, what in by_kind.items())]
        further = sum(fold.further for fold in folds) + max(0, len(found) - MOST_SHOWN)
        if found:
            return Verdict(rule, State.VIOLATED, "; ".join(seen) or "as the violations say", tuple(found[:MOST_SHOWN]),
                           further)
        if seen:
            return Verdict(rule, State.KEPT, "; ".join(seen))
        return Verdict(rule, State.UNSEEN, "; ".join(_unique(fold.lacks for fold in folds)))


def _unique(words: Iterable[str]) -> Iterator[str]:
    yield from dict.fromkeys(words)
