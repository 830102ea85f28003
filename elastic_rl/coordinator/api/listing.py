"""Listings in pages. Records go out as they are stored: they are JSON already, and a thousand of them are many."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated

from fastapi import Query, Response

from elastic_rl.coordinator.problems import Kind, Problem
from elastic_rl.coordinator.store import KeyValue, Store

JSON = "application/json"
MOST = 1000
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


def stored(store: Store, prefix: str, limit: int, after: str, *, newest_first: bool = False) -> Response:
    """One page of the records under a prefix, in the order of their keys or against it."""
    found = store.page(prefix, limit=limit, after=prefix + place(after) if after else "", newest_first=newest_first)
    return page([kv.value for kv in found.kvs], _rest(found.kvs, prefix) if found.more else None)


def _rest(kvs: Sequence[KeyValue], prefix: str) -> str:
    return kvs[-1].key.removeprefix(prefix)
