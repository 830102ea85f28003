"""What may go out of a record as it is stored: the bytes that its own kind decodes.

Answers and streams have records as they are stored, since a page holds up to a thousand. A record that another release
or a foreign program has written may be no JSON, have numbers that no client can read, or parts of other types; it is
left out by the same rule by which the leader calls it unreadable, in its alert."""

from __future__ import annotations

from typing import Any

import orjson

from elastic_rl.coordinator.alerts.state_machine import Alert
from elastic_rl.etcd.record import Record
from elastic_rl.etcd.records import Engine, Event, Member, Operation, Silence, StepMetrics, Version

_KINDS: dict[str, type[Record]] = {
    "alerts": Alert, "engines": Engine, "events": Event, "members": Member, "operations": Operation,
    "silences": Silence, "steps": StepMetrics, "dcs": Version}


def kind_of(key: str) -> type[Record] | None:
    """The kind of the record under a key, ``/elastic_rl/SCOPE/KIND/…``, of those that go out as they are stored. Pure.
    """
    parts = key.split("/")
    if len(parts) < 4 or (parts[3] == "dcs" and parts[-2] != "versions"):
        return None
    return _KINDS.get(parts[3])


def stored_fields(key: str, raw: bytes) -> dict[str, Any]:
    """The fields of a record. Raises ValueError for one that its kind does not decode, and for what is no JSON object.
    Pure."""
    if (kind := kind_of(key)) is not None:
        kind.decode(raw)
    found = orjson.loads(raw)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found
