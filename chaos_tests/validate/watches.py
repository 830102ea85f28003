"""Watches of the product's client against what the observer saw: each change once, in the order of the store, over
reconnects; where changes were compacted, the client reads the range again. Also the order of the observer itself."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate.replay import Transaction
from chaos_tests.validate.verdict import RUN, Checker

_Seen = tuple[int, bool, str]
"""Revision, whether it is a put, key."""
_Delivered = tuple[int, bool, str, bool]
"""The same, and whether the range was read."""
_MOST_CHANGES = 500_000
"""Newest changes that are kept for what watches have delivered."""


class ObservedOrder(Checker):
    """The observer's record is whole and in order: revisions grow, a transaction changes a key once, and it goes on to
    the last revision of the run. A record that breaks this proves nothing."""

    rule = RUN
    keys = ("",)
    judges = "transactions of etcd observed"
    lacks = "the observer saw no change of etcd"

    def __init__(self) -> None:
        super().__init__()
        self._last = 0

    def gap(self, first: int, last: int) -> None:
        if first <= self._last or last < first:
            self.violated(f"the observer lost revisions {first} to {last} after {self._last}")
        self._last = max(self._last, last)

    def transaction(self, found: Transaction) -> None:
        self.judged += 1
        if found.revision <= self._last:
            self.violated(f"the observer saw revision {found.revision} after {self._last}", found.steps[0].event)
        elif len({step.key for step in found.steps}) < len(found.steps):
            self.violated(f"the observer saw a key twice at revision {found.revision}",
                          *(step.event for step in found.steps))
        self._last = max(self._last, found.revision)

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        until = int((end or {}).get("revision") or 0)
        if not self.judged:
            self.violated(self.lacks)
        elif self._last < until:
            self.violated(f"the observer saw etcd up to revision {self._last}, and the run ended at {until}")


class Watches(Checker):
    """What each watch delivered is what the store did under its prefix, in that order, from where it began or has read
    the range again, up to the last change that it delivered."""

    rule = "I1"
    reads = frozenset({Kind.WATCH})
    keys = ("",)
    judges = "changes delivered by watches"
    lacks = "the log has no watches"

    def __init__(self) -> None:
        super().__init__()
        self._store, self._gaps = deque[_Seen](maxlen=_MOST_CHANGES), [(0, 0)]
        """Those of which nothing is known: the first are changes so old that they are not kept."""
        self._delivered = defaultdict[tuple[str, str], list[_Delivered]](list)

    def transaction(self, found: Transaction) -> None:
        self._store.extend((step.revision, step.put, step.key) for step in found.steps)
        if len(self._store) == _MOST_CHANGES:
            self._gaps[0] = (0, self._store[0][0])

    def gap(self, first: int, last: int) -> None:
        self._gaps.append((first, last))

    def see(self, event: Event) -> None:
        self.judged += 1
        self._delivered[event["client"], event["prefix"]].append(
            (event["revision"], event.get("put", False), event.get("key", ""), bool(event.get("listed"))))

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        for (client, prefix), delivered in self._delivered.items():
            changes = [change for change in self._store if change[2].startswith(prefix)]
            for problem in _of_watch(delivered, changes, self._gaps):
                self.violated(f"the watch of {client} on {prefix}: {problem}")


def _of_watch(delivered: Sequence[_Delivered], changes: Sequence[_Seen], gaps: Sequence[tuple[int, int]]
              ) -> Iterator[str]:
    first, *_ = delivered
    listed, got, revisions = first[0] - (not first[3]), list[_Seen](), [change[0] for change in changes]
    for event in [*delivered, None]:
        if event is not None and not event[3]:
            got.append(event[:3])
            continue
        last = got[-1][0] if got else listed
        if got and not any(begin <= last and listed < until for begin, until in gaps):
            yield from _differences(got, changes[bisect_right(revisions, listed):bisect_right(revisions, last)])
        if event is not None and event[0] < last:
            yield f"it read the range at revision {event[0]}, after {last}"
        listed, got = event[0] if event is not None else 0, []


def _differences(got: Sequence[_Seen], wanted: Sequence[_Seen]) -> Iterator[str]:
    came, made = set(got), set(wanted)
    if len(came) < len(got):
        seen = set[_Seen]()
        twice = next(c for c in got if c in seen or seen.add(c))  # type: ignore[func-returns-value]
        yield f"{twice[2]} of revision {twice[0]} came twice"
    elif lost := [c for c in wanted if c not in came]:
        yield f"{len(lost)} changes are missing, first {lost[0][2]} of revision {lost[0][0]}"
    elif invented := [c for c in got if c not in made]:
        yield f"{invented[0][2]} of revision {invented[0][0]} is no change of the store"
    elif got != wanted:
        n = next(n for n, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
        yield f"{got[n][2]} of revision {got[n][0]} came in another order"


CHECKERS: tuple[type[Checker], ...] = (ObservedOrder, Watches)
