"""Listings in pages. Records go out as they are stored: they are JSON already, and a page holds up to a thousand."""

from __future__ import annotations

import base64
import binascii
import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import Query, Response

from elastic_rl.coordinator.api.stored_records import stored_fields
from elastic_rl.coordinator.problems import Kind, Problem
from elastic_rl.etcd import heartbeats
from elastic_rl.etcd.client import EtcdClient, KeyValue, Page
from elastic_rl.etcd.decoding import readable as decoded
from elastic_rl.etcd.keys import DCS_ROLE, Keys
from elastic_rl.etcd.record import OpenEnum
from elastic_rl.etcd.records import DcsNode, Member

log = logging.getLogger(__name__)

JSON = "application/json"
MAX_ITEMS = 1000
"""Items of a page, at most."""
_WINDOWS, _WIDEST = 6, 2000
"""Windows of version numbers that are read before all is sorted, and the widest."""
_SORTED = 1000
"""Keys that etcd may sort for one page."""
_SPANS, _SPAN_MS = 8, 60_000
"""Spans of time, each eight times as long as the one before, that are tried before all events are sorted."""
_MAX_CURSOR = 512

Limit = Annotated[int, Query(ge=1, le=MAX_ITEMS, description="Most items of the answer.")]
After = Annotated[str, Query(max_length=_MAX_CURSOR, description="Where to continue: ``next`` of the page before.")]


def cursor(place: str) -> str:
    """The opaque word for a place in a listing, such as the end of a key."""
    return base64.urlsafe_b64encode(place.encode()).decode().rstrip("=")


def place(after: str) -> str:
    """The place that a cursor stands for. Raises a 422 problem for anything else."""
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


def require_known(name: str, value: OpenEnum | None) -> None:
    """Raises a 422 problem for the value of a filter that this release does not know."""
    if value is not None and not value.known:
        raise Problem(422, Kind.INVALID, "The request is not valid", f"{name} must be one of {', '.join(type(value))}",
                      errors=[{"pointer": f"/{name}", "detail": f"one of {', '.join(type(value))}"}])


def fields(kv: KeyValue) -> dict[str, Any]:
    """A record's fields; empty for one that its kind does not decode, which is logged: one record that cannot be read
    must not break a listing."""
    try:
        return stored_fields(kv.key, kv.value)
    except ValueError:
        log.warning("leaving out an unreadable record: %s", kv.key)
        return {}


def created_at(kv: KeyValue) -> float:
    """When a record was made (unix seconds); 0 where it does not say so in a number."""
    found = fields(kv).get("created_at")
    return float(found) if isinstance(found, int | float) else 0.0


def readable(kvs: Iterable[KeyValue]) -> list[bytes]:
    """The records that can be read, as they are stored."""
    return [kv.value for kv in kvs if fields(kv)]


def page(items: Sequence[bytes], next_place: str | None) -> Response:
    """The answer with one page; ``items`` are JSON. ``next_place`` is None on the last one."""
    end = f'"{cursor(next_place)}"'.encode() if next_place is not None else b"null"
    return Response(b'{"items":[' + b",".join(items) + b'],"next":' + end + b"}", media_type=JSON)


def stored(etcd: EtcdClient, prefix: str, limit: int, after: str, *, newest_first: bool = False) -> Response:
    """One page of the records under a prefix, in the order of their keys or in reverse."""
    bound = prefix + place(after) if after else ""
    found = etcd.page(prefix, limit=limit, after="" if newest_first else bound, before=bound if newest_first else "",
                      newest_first=newest_first)
    return page(readable(found.kvs), _last_place(found, prefix))


def members(etcd: EtcdClient, keys: Keys, role: str, limit: int, after: str) -> Response:
    """One page of the members, of one role or of all, each with its newest heartbeat. The nodes of the checkpoint
    service, which have records of their own, are there by their role alone."""
    if role == DCS_ROLE:
        found = etcd.page(keys.dcs_nodes_prefix(), limit=limit,
                          after=keys.dcs_node(place(after)) if after else "")
        return page([_as_member(node).encode() for node, _ in decoded(found.kvs, DcsNode)],
                    _last_place(found, keys.dcs_nodes_prefix()))
    prefix = keys.members_prefix(role)
    found = etcd.page(prefix, limit=limit, after=prefix + place(after) if after else "")
    return page(heartbeats.merge_stored(readable(found.kvs), partial(heartbeats.read, etcd, keys)),
                _last_place(found, prefix))


def _as_member(node: DcsNode) -> Member:
    return Member(role=DCS_ROLE, id=node.id, pid=node.pid, host=node.host, machine=node.machine, phase="serving",
                  incarnation=node.incarnation, info=node.model_dump(include={
                      "port", "arena_bytes", "used_bytes", "disk_bytes", "disk_used_bytes", "disk_room_bytes", "chunks",
                      "unsaved", "disk_fault", "lost_chunks"}))


def newest_events(etcd: EtcdClient, keys: Keys, limit: int, *, before: str = "", revision: int = 0) -> Page:
    """The newest ``limit`` events, the newest first; ``before``: only those with smaller ids.

    etcd sorts every key of a range to return the last ones. So where there are many events, the range is the shortest
    span of time that holds enough of them.
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
    return page(readable(found.kvs), _last_place(found, keys.events_prefix()))


def newest_versions(etcd: EtcdClient, keys: Keys, stream: str, limit: int, *, below: int = 0, revision: int = 0
                    ) -> list[KeyValue]:
    """The newest ``limit`` versions of a stream, the newest first; ``below``: only of smaller numbers, 0: all.

    etcd sorts every key of a range to return the last ones, and a run of weeks leaves very many. So they are read in
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


def _last_place(found: Page, prefix: str) -> str | None:
    """Where the next page starts; None on the last one."""
    return found.kvs[-1].key.removeprefix(prefix) if found.more else None
