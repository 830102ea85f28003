"""The event log of a job: what happened, for people, the API's stream and the alerts. The leader trims it."""

from __future__ import annotations

import secrets
import time
from typing import Any

from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Event, Severity
from elastic_rl.etcd.transaction import Op


def make(kind: str, subject: str, message: str, *, at: float, salt: str, severity: Severity = Severity.INFO,
         data: dict[str, Any] | None = None) -> Event:
    """An event at unix second ``at``. Ids sort by time; ``salt`` keeps events of one millisecond apart."""
    return Event(id=f"{int(at * 1000):015d}-{salt}", at=at, kind=kind, subject=subject, message=message,
                 severity=severity, data=data or {})


def build(kind: str, subject: str, message: str, *, severity: Severity = Severity.INFO, **data: Any) -> Event:
    """An event of now that is not written yet; ``put_op`` makes it part of a transaction."""
    return make(kind, subject, message, at=time.time(), salt=secrets.token_hex(2), severity=severity, data=data)


def put_op(keys: Keys, event: Event) -> Op:
    """The operation that writes an event, for a transaction that changes what the event tells of."""
    return Op.put(keys.event(event.id), event.encode())


def emit(etcd: EtcdClient, keys: Keys, kind: str, subject: str, message: str, *, severity: Severity = Severity.INFO,
         **data: Any) -> Event:
    """Writes an event of now; ``data`` must be JSON-able. Raises EtcdUnavailable."""
    event = build(kind, subject, message, severity=severity, **data)
    etcd.put(keys.event(event.id), event.encode())
    return event


def recent(etcd: EtcdClient, keys: Keys, limit: int = 100) -> list[Event]:
    """The last ``limit`` events, the newest last."""
    kvs, _ = etcd.range(keys.events_prefix(), limit=limit, newest_first=True)
    return [Event.decode(kv.value) for kv in reversed(kvs)]
