"""Watches of the product's client against what the observer saw: each change once, in the order of the store, over
reconnects; where changes were compacted, the client reads the range again. Also the order of the observer itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate.replay import Checker
from chaos_tests.validate.verdict import Violation

_Seen = tuple[int, bool, str]
"""Revision, whether it is a put, key."""


def observed_order(events: Iterable[Event]) -> Iterator[Violation]:
    """The observer's record is whole and in order: revisions grow, and a transaction changes a key once. A record that
    breaks this proves nothing."""
    last, keys = 0, set[str]()
    for event in events:
        if event["kind"] == Kind.GAP:
            if event["first"] <= last or event["last"] < event["first"]:
                yield Violation("run", f"the observer lost revisions {event['first']} to {event['last']} after {last}")
            last, keys = max(last, event["last"]), set()
        elif event["kind"] == Kind.CHANGE:
            revision, key = event["revision"], event["key"]
            if revision < last:
                yield Violation("run", f"the observer saw revision {revision} after {last}")
            elif revision == last and key in keys:
                yield Violation("run", f"the observer saw {key} twice at revision {revision}")
            keys = keys | {key} if revision == last else {key}
            last = max(last, revision)


def watches(events: Iterable[Event]) -> Iterator[Violation]:
    """What each watch delivered is what the store did under its prefix, in that order, from where it began or has read
    the range again, up to the last change that it delivered."""
    store, gaps = list[_Seen](), list[tuple[int, int]]()
    delivered = defaultdict[tuple[str, str], list[Event]](list)
    for event in events:
        if event["kind"] == Kind.CHANGE:
            store.append((event["revision"], event["put"], event["key"]))
        elif event["kind"] == Kind.GAP:
            gaps.append((event["first"], event["last"]))
        elif event["kind"] == Kind.WATCH:
            delivered[event["client"], event["prefix"]].append(event)
    for (client, prefix), found in delivered.items():
        changes = [s for s in store if s[2].startswith(prefix)]
        for problem in _of_watch(found, changes, gaps):
            yield Violation("I1", f"the watch of {client} on {prefix}: {problem}")


def _of_watch(delivered: list[Event], changes: list[_Seen], gaps: list[tuple[int, int]]) -> Iterator[str]:
    listed, got = delivered[0]["revision"] - (not delivered[0].get("listed")), list[_Seen]()
    for event in [*delivered, None]:
        if event is not None and not event.get("listed"):
            got.append((event["revision"], event["put"], event["key"]))
            continue
        if got and not any(first <= got[-1][0] and listed < last for first, last in gaps):
            yield from _differences(got, [c for c in changes if listed < c[0] <= got[-1][0]])
        if event is not None and event["revision"] < (got[-1][0] if got else listed):
            yield f"it read the range at revision {event['revision']}, after {got[-1][0] if got else listed}"
        listed, got = event["revision"] if event is not None else 0, []


def _differences(got: list[_Seen], wanted: list[_Seen]) -> Iterator[str]:
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


CHECKERS: tuple[tuple[str, Checker], ...] = (("run", observed_order), ("I1", watches))
