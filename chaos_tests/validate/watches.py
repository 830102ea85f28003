"""Watches of the product's client against what the observer saw: each change once, in the order of the store, over
reconnects; where changes were compacted, the client reads the range again. Also the order of the observer itself."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate.replay import Transaction
from chaos_tests.validate.verdict import RUN, Checker

_Seen = tuple[int, bool, str]
"""Revision, whether it is a put, key."""
_MOST_CHANGES = 500_000
"""Newest changes that are kept for what watches have delivered."""
_AT_ONCE = 20_000
"""Changes of a watch that are judged together."""


class ObservedOrder(Checker):
    """The observer's record is whole and in order: revisions grow, a transaction changes a key once, and it goes on to
    the last revision of the run. A record that breaks this proves nothing."""

    rule = RUN
    keys = ("",)
    judges = "transactions of etcd observed"
    lacks = "the observer saw no change of etcd"

    def __init__(self) -> None:
        super().__init__()
        self._last = self._unseen = 0

    def gap(self, first: int, last: int) -> None:
        self._unseen += max(0, last - first + 1)
        if first <= self._last or last < first:
            self.violated(f"the observer lost revisions {first} to {last} after {self._last}")
        self._last = max(self._last, last)

    def transaction(self, found: Transaction) -> None:
        self.judged += 1
        if found.revision <= self._last:
            self.violated(f"the observer saw revision {found.revision} after {self._last}", found.changes[0].event)
        elif len({change.key for change in found.changes}) < len(found.changes):
            self.violated(f"the observer saw a key twice at revision {found.revision}",
                          *(change.event for change in found.changes))
        self._last = max(self._last, found.revision)

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        until = int((end or {}).get("revision") or 0)
        if not self.judged:
            self.violated(self.lacks)
        elif self._last < until:
            self.violated(f"the observer saw etcd up to revision {self._last}, and the run ended at {until}")

    def evidence(self) -> str:
        gaps = f", and {self._unseen:,} revisions not: they were compacted before" if self._unseen else ""
        return super().evidence() + gaps if self.judged else ""


class Watches(Checker):
    """What each watch delivered is what the store did under its prefix, in that order, from where it began or has read
    the range again, up to the last change that it delivered; in a whole log, that is the last one of the run."""

    rule = "I1"
    reads = frozenset({Kind.WATCH})
    keys = ("",)
    judges = "changes delivered by watches"
    lacks = "the log has no watches"

    def __init__(self) -> None:
        super().__init__()
        self._store, self._gaps = deque[_Seen](maxlen=_MOST_CHANGES), [(0, 0)]
        """The first gap stands for the changes that are so old that they are not kept."""
        self._watches = dict[tuple[str, str], _Delivered]()

    def transaction(self, found: Transaction) -> None:
        if len(self._store) + len(found.changes) > _MOST_CHANGES:
            self._gaps[0] = (0, self._store[len(found.changes)][0])
        self._store.extend((change.revision, change.put, change.key) for change in found.changes)

    def gap(self, first: int, last: int) -> None:
        self._gaps.append((first, last))

    def see(self, event: Event) -> None:
        of = (str(event["client"]), str(event["prefix"]))
        revision, listed = int(event["revision"]), bool(event.get("listed"))
        watch = self._watches.setdefault(of, _Delivered(revision if listed else revision - 1))
        watch.reached = max(watch.reached, revision)
        if listed:
            last = watch.changes[-1][0] if watch.changes else watch.since
            watch.parts.append((watch.since, watch.changes))
            if revision < last:
                self._wrong(of, f"it read the range at revision {revision}, after {last}")
            watch.since, watch.changes = revision, []
        else:
            self.judged += 1
            watch.changes.append((revision, bool(event["put"]), str(event["key"])))
            watch.count += 1
        if watch.count >= _AT_ONCE and self._store and self._store[-1][0] >= revision:
            self._judge(of, watch, whole=False)

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        until = int((end or {}).get("revision") or 0)
        for of, watch in self._watches.items():
            # A watch is ended once it has delivered the last change of the run, perhaps amid a later transaction.
            self._judge(of, watch, whole=end is None or not watch.changes or watch.changes[-1][0] <= until)
        for of, watch in self._watches.items():
            if lost := [change for change in self._store
                        if watch.reached < change[0] <= until and change[2].startswith(of[1])]:
                self._wrong(of, f"it delivered nothing after revision {watch.reached}, and {len(lost)} changes are "
                                f"missing, first {lost[0][2]} of revision {lost[0][0]}")

    def _judge(self, of: tuple[str, str], watch: _Delivered, *, whole: bool) -> None:
        """Judges what was delivered, and forgets it. ``whole``: also the last transaction, of which more may come."""
        last = watch.changes[-1][0] if watch.changes else 0
        now = [change for change in watch.changes if whole or change[0] < last]
        parts = [*watch.parts, (watch.since, now)]
        watch.parts, watch.count = [], 0
        if now and not whole:
            watch.since, watch.changes = now[-1][0], watch.changes[len(now):]
        changes = [change for change in self._store if change[2].startswith(of[1])]
        revisions = [change[0] for change in changes]
        for since, got in parts:
            if got and not any(first <= got[-1][0] and since < until for first, until in self._gaps):
                wanted = changes[bisect_right(revisions, since):bisect_right(revisions, max(c[0] for c in got))]
                for problem in _differences(got, wanted):
                    self._wrong(of, problem)

    def _wrong(self, of: tuple[str, str], problem: str) -> None:
        self.violated(f"the watch of {of[0]} on {of[1]}: {problem}")


@dataclass
class _Delivered:
    """What one watch has delivered and is not judged yet."""

    since: int
    """Revision after which its present changes are."""
    changes: list[_Seen] = field(default_factory=list)
    parts: list[tuple[int, list[_Seen]]] = field(default_factory=list)
    """What the watch had delivered each time before it read the range again: after which revision, and the changes."""
    count: int = 0
    reached: int = 0
    """The newest revision that it has shown."""


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
