"""The event log of a job: what happened, for people, the API's change stream and the alerts. The leader trims it.

An event is written in the transaction that makes it true (``put_op``), or by ``fencing.FencedWriter.emit``, so that a
stale writer's event is refused like its other writes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.keys import LeaderKeys
from elastic_rl.etcd.records import Event, Severity
from elastic_rl.etcd.transaction import Compare, Op


def build(kind: EventKind, subject: str, message: str, *, severity: Severity = Severity.INFO,
          at: float | None = None, **data: Any) -> Event:
    """An event that is not written yet. ``at``: unix seconds, now if not given; ``data`` must be JSON-able. Raises
    ValueError for a kind that ``event_kinds`` does not declare.

    Its id starts with the time, so that ids sort by it, and ends with 64 random bits, so that no two events of any
    writers share one.
    """
    if event_kinds.find(kind.name) != kind:
        raise ValueError(f"{kind.name} is no declared kind of event; declare it in elastic_rl/etcd/event_kinds.py")
    at = time.time() if at is None else at
    return Event(id=f"{int(at * 1000):015d}-{secrets.token_hex(8)}", at=at, kind=kind.name, subject=subject,
                 message=message, severity=severity, data=data)


def put_op(keys: LeaderKeys, event: Event) -> Op:
    """The operation that writes an event, for the transaction that makes the change the event reports."""
    return Op.put(keys.event(event.id), event.encode())


def emit(etcd: EtcdClient, keys: LeaderKeys, kind: EventKind, subject: str, message: str, *,
         severity: Severity = Severity.INFO, **data: Any) -> Event:
    """Writes an event under no fencing token: only for writers that hold none. Raises EtcdUnavailable."""
    event = build(kind, subject, message, severity=severity, **data)
    etcd.txn([Compare.absent(keys.event(event.id))], [put_op(keys, event)])
    return event


def recent(etcd: EtcdClient, keys: LeaderKeys, limit: int = 100) -> list[Event]:
    """Those of the last ``limit`` events that can be read, the newest last. Raises EtcdUnavailable."""
    return _newest(etcd, keys, limit)[0]


def back_to(etcd: EtcdClient, keys: LeaderKeys, known: Callable[[Event], bool], *, limit: int = 200,
            most: int = 20_000) -> list[Event]:
    """The newest events, the newest last: as many as it takes until the oldest of them is known, but ``most`` at most.
    ``limit``: how many are read first; a rack that fails gives hundreds at once. Raises EtcdUnavailable."""
    while True:
        found, count = _newest(etcd, keys, limit)
        if count < limit or limit >= most or (found and known(found[0])):
            return found
        limit = min(most, 4 * limit)


def _newest(etcd: EtcdClient, keys: LeaderKeys, limit: int) -> tuple[list[Event], int]:
    """Those of the newest events that can be read, the newest last, and how many there were."""
    kvs, _ = etcd.range(keys.events_prefix(), limit=limit, newest_first=True)
    return [event for event, _ in readable(reversed(kvs), Event)], len(kvs)
