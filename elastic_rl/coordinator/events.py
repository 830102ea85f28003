"""The event log of a job: what happened, for people, the API's stream and the alerts. The leader trims it."""

from __future__ import annotations

import secrets
import time
from typing import Any

from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.ops import Op
from elastic_rl.coordinator.records import Event, Severity
from elastic_rl.coordinator.store import Store


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


def emit(store: Store, keys: Keys, kind: str, subject: str, message: str, *, severity: Severity = Severity.INFO,
         **data: Any) -> Event:
    """Writes an event of now; ``data`` must be JSON-able. Raises StoreUnavailable."""
    event = build(kind, subject, message, severity=severity, **data)
    store.put(keys.event(event.id), event.encode())
    return event


def recent(store: Store, keys: Keys, limit: int = 100) -> list[Event]:
    """The last ``limit`` events, the newest last."""
    kvs, _ = store.range(keys.events_prefix(), limit=limit, newest_first=True)
    return [Event.decode(kv.value) for kv in reversed(kvs)]
