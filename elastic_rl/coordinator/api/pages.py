"""Listings in pages. Records go out as they are stored: they are JSON already, and a thousand of them are many."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import Query, Response

from elastic_rl.coordinator.problems import Kind, Problem
from elastic_rl.etcd.client import EtcdClient, KeyValue, Page
from elastic_rl.etcd.keys import Keys

JSON = "application/json"
MOST = 1000
_WINDOWS, _WIDEST = 6, 2000
_SORTED = 1000
"""Keys that may be sorted without much thought."""
_SPANS, _SPAN_MS = 8, 60_000
_LONGEST = 512

Limit = Annotated[int, Query(ge=1, le=MOST, description="Most items of the answer.")]
After = Annotated[str, Query(max_length=_LONGEST, description="Where to go on: ``next`` of the page before.")]


def cursor(place: str) -> str:
    """The opaque word for a place in a listing, such as the end of a key."""
    return base64.urlsafe_b64encode(place.encode()).decode().rstrip("=")


def place(after: str) -> str:
    """The place that a cursor stands for. Raises a 422 problem for what is no cursor."""
    try:
        found = base64.b64decode(after + "=" * (-len(after) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as e:
        raise bad_cursor(after) from e
    if cursor(found) != after or "\0" in found:
        raise bad_cursor(after)
    return found


def bad_cursor(after: str) -> Problem:
    return Problem(422, Kind.INVALID, "The request is not valid", f"after={after!r} is not the ``next`` of a page",
                   errors=[{"pointer": "/after", "detail": "the ``next`` of a page"}])


def page(items: Sequence[bytes], next_place: str | None) -> Response:
    """The answer with one page; ``items`` are JSON. ``next_place`` is None on the last one."""
    end = f'"{cursor(next_place)}"'.encode() if next_place is not None else b"null"
    return Response(b'{"items":[' + b",".join(items) + b'],"next":' + end + b"}", media_type=JSON)


def stored(etcd: EtcdClient, prefix: str, limit: int, after: str, *, newest_first: bool = False) -> Response:
    """One page of the records under a prefix, in the order of their keys or against it."""
    bound = prefix + place(after) if after else ""
    found = etcd.page(prefix, limit=limit, after="" if newest_first else bound, before=bound if newest_first else "",
                       newest_first=newest_first)
    return page([kv.value for kv in found.kvs], _rest(found.kvs, prefix) if found.more else None)


def newest_events(etcd: EtcdClient, keys: Keys, limit: int, *, before: str = "", revision: int = 0) -> Page:
    """The newest ``limit`` events, the newest first; ``before``: only those with smaller ids.

    etcd sorts all that it looks at to give the last ones, so where there are many it is asked about as short a time as
    holds enough.
    """
    prefix, bound = keys.events_prefix(), keys.event(before) if before else ""
    after = ""
    if etcd.count(prefix, before=bound) > _SORTED:
        until = float(before[:15]) if before[:15].isdecimal() else time.time() * 1000
        for n in range(_SPANS):
            since = keys.event(f"{max(0, int(until - _SPAN_MS * 8 ** n)):015d}")
            if etcd.count(prefix, after=since, before=bound) > limit:
                after = since
                break
    return etcd.page(prefix, limit=limit, after=after, before=bound, newest_first=True, revision=revision)


def events(etcd: EtcdClient, keys: Keys, limit: int, after: str) -> Response:
    """One page of the events, the newest first."""
    if not limit:
        return page([], None)
    found = newest_events(etcd, keys, limit, before=place(after) if after else "")
    return page([kv.value for kv in found.kvs], _rest(found.kvs, keys.events_prefix()) if found.more else None)


def newest_versions(etcd: EtcdClient, keys: Keys, stream: str, limit: int, *, below: int = 0, revision: int = 0
                    ) -> list[KeyValue]:
    """The newest ``limit`` versions of a stream, the newest first; ``below``: only of smaller numbers, 0: all.

    A run of weeks leaves very many records, and etcd sorts all of them to give the last ones. So they are taken in
    windows of numbers, and sorted only where there are large gaps.
    """
    prefix = keys.versions_prefix(stream)
    if not below:
        following = etcd.page(keys.stream_next(stream), limit=1, revision=revision).kvs
        below = int(following[0].value) + 1 if following else 0
    found: list[KeyValue] = []
    width = limit
    for _ in range(_WINDOWS):
        if below <= 1 or len(found) >= limit:
            break
        low = max(0, below - width - 1)
        found += etcd.page(prefix, limit=width, after=keys.version(stream, low), before=keys.version(stream, below),
                            revision=revision).kvs[::-1]
        below, width = low + 1, min(2 * width, _WIDEST)
    if below != 1 and len(found) < limit:
        found += etcd.page(prefix, limit=limit - len(found), before=keys.version(stream, below) if below else "",
                            newest_first=True, revision=revision).kvs
    return found[:limit]


def _rest(kvs: Sequence[KeyValue], prefix: str) -> str:
    return kvs[-1].key.removeprefix(prefix)
