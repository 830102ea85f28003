"""What a change of a key in etcd means to subscribers of the API. No I/O.

Most kinds are one record under one key and go out as they are stored. A pool is two keys (spec and status) and the job
is several (status, epoch, leader), so a ``ChangeProjector`` remembers these parts. The newest heartbeat of a member may
be under the key of its host, together with those of others; it remembers both, and only says which of them changed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import orjson

from elastic_rl.coordinator import job_view, pools
from elastic_rl.coordinator.api.stored_records import stored_fields
from elastic_rl.etcd.client import KeyValue, WatchEvent
from elastic_rl.etcd.decoding import decode_bytes
from elastic_rl.etcd.heartbeats import HeartbeatIndex, merge
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Heartbeat, HostHeartbeats, Member

log = logging.getLogger(__name__)

KINDS = ("job", "pool", "engine", "version", "operation", "alert", "event", "member", "step")


@dataclass(frozen=True)
class ObjectChange:
    """An object that was created or changed, or that is gone."""

    revision: int
    kind: str
    """One of KINDS."""
    id: str
    """Unique within its kind: a pool's name, ``role/id`` of a member, ``stream/number`` of a version, the number of a
    step, ``kind/subject`` of an alert, the id of anything else; the job's name."""
    object: bytes | None
    """The object as JSON on one line; None when it is gone."""

    @cached_property
    def frame(self) -> bytes:
        """The change as a Server-Sent Event; encoded once for all subscribers."""
        head = f'id: {self.revision}\nevent: change\ndata: {{"kind":"{self.kind}","id":{json.dumps(self.id)},"object":'
        return head.encode() + (self.object or b"null") + b"}\n\n"


class ChangeProjector:
    """Turns watch events into changes. Used by one thread."""

    def __init__(self, keys: Keys, replica: str) -> None:
        self._keys, self._replica = keys, replica
        self._parts: dict[str, KeyValue] = {}  # of pools and of the job
        self._alerts: dict[str, str] = {}  # key of an alert's condition → key of its newest record
        self._members: dict[str, Member] = {}  # by ``role/id``, as subscribers have them
        self._collected = HeartbeatIndex()
        self._projections: dict[str, Callable[[str, WatchEvent], ObjectChange | None]] = {
            "pools": self._pool, "job": self._job, "epoch": self._job, "leader": self._job,
            "leader_problem": self._job,
            "engines": _record("engine"), "operations": _record("operation"), "members": self._member,
            "alerts": self._alert, "events": _log_entry("event"), "steps": _log_entry("step"), "dcs": _version}

    def load(self, kvs: Iterable[KeyValue]) -> None:
        """Takes the keys of the pools, of the job, of the alerts and of the members with their heartbeats as they are
        when the watch starts."""
        members = list[tuple[str, Member]]()
        for kv in kvs:
            name = kv.key.removeprefix(self._keys.root)
            if name.startswith("alerts/"):
                self._alerts[name.rpartition("/")[0]] = kv.key
            elif name.startswith("members/"):
                if (record := decode_bytes(kv.value, Member)) is not None:
                    members.append((name.removeprefix("members/"), record))
            elif name.startswith("heartbeats/"):
                self._take_heartbeats(kv)
            else:
                self._parts[kv.key] = kv
        for name, record in members:
            self._members[name] = merge(record, self._collected.of(record))

    def apply(self, event: WatchEvent) -> list[ObjectChange]:
        """The changes that a watch event means; none where subscribers see nothing of it, and for a record that this
        release cannot read."""
        name = event.kv.key.removeprefix(self._keys.root)
        kind = name.partition("/")[0]
        project = self._projections.get(kind)
        try:
            if kind == "heartbeats":
                return self._heartbeats(event)
            change = project(name, event) if project is not None else None
        except (ValueError, KeyError, TypeError) as e:  # pydantic's and orjson's errors are ValueErrors
            log.warning("skipping an unreadable record in the change stream: %s: %s", event.kv.key, e)
            return []
        return [change] if change is not None else []

    # -- objects of several keys --------------------------------------------------------------------------------
    def _remember(self, event: WatchEvent) -> None:
        if event.type == "put":
            self._parts[event.kv.key] = event.kv
        else:
            self._parts.pop(event.kv.key, None)

    def _pool(self, name: str, event: WatchEvent) -> ObjectChange | None:
        self._remember(event)
        pool = name.split("/")[1]
        spec = self._parts.get(self._keys.pool_spec(pool))
        if spec is None and event.kv.key != self._keys.pool_spec(pool):
            return None
        shown = pools.view(spec, self._parts.get(self._keys.pool_status(pool))) if spec else None
        return ObjectChange(event.kv.mod_revision, "pool", pool, shown.model_dump_json().encode() if shown else None)

    def _job(self, name: str, event: WatchEvent) -> ObjectChange:
        self._remember(event)
        shown = job_view.view(self._keys, self._replica, self._parts.values())
        return ObjectChange(event.kv.mod_revision, "job", self._keys.job, shown.model_dump_json().encode())

    def _alert(self, name: str, event: WatchEvent) -> ObjectChange | None:
        condition = name.rpartition("/")[0]
        if event.type == "put":
            self._alerts[condition] = event.kv.key
        elif self._alerts.get(condition) != event.kv.key:
            return None  # an old alert is deleted while a newer one of its condition exists
        else:
            del self._alerts[condition]
        return _whole("alert", condition.removeprefix("alerts/"), event)

    def _member(self, name: str, event: WatchEvent) -> ObjectChange | None:
        who = name.removeprefix("members/")
        known = self._members.pop(who, None)
        record = decode_bytes(event.kv.value, Member) if event.type == "put" else None
        if record is None:
            return _whole("member", who, event)
        merged = self._members[who] = merge(record, self._collected.of(record))
        if known is not None and _is_heartbeat(known, merged):
            return None
        return _whole("member", who, event) if merged is record else ObjectChange(
            event.kv.mod_revision, "member", who, merged.encode())

    def _heartbeats(self, event: WatchEvent) -> list[ObjectChange]:
        """The members of a host that made progress."""
        if event.type == "delete":  # the members now write their heartbeats themselves, or have ended
            self._collected.remove(event.kv.key.removeprefix(self._keys.heartbeats_prefix()))
            return []
        changes = []
        for beat in self._take_heartbeats(event.kv):
            who = f"{beat.role}/{beat.id}"
            if (known := self._members.get(who)) is None:
                continue
            merged = merge(known, self._collected.of(known))
            if not _is_heartbeat(known, merged):
                changes.append(ObjectChange(event.kv.mod_revision, "member", who, merged.encode()))
                self._members[who] = merged
        return changes

    def _take_heartbeats(self, kv: KeyValue) -> list[Heartbeat]:
        """The heartbeats under a key, which are known from then on; none for what this release cannot read."""
        record = decode_bytes(kv.value, HostHeartbeats)
        if record is None or kv.key != self._keys.heartbeats(record.host):
            return []
        self._collected.put(record)
        return record.beats


def _is_heartbeat(before: Member, after: Member) -> bool:
    """Whether a member has changed in its last beat alone."""
    return before.replace(beat_at=0.0, beats=0) == after.replace(beat_at=0.0, beats=0)


def _whole(kind: str, name: str, event: WatchEvent) -> ObjectChange:
    """A record as it is stored. Raises ValueError for one that would break the stream's format."""
    if event.type == "delete":
        return ObjectChange(event.kv.mod_revision, kind, name, None)
    raw, fields = event.kv.value, stored_fields(event.kv.key, event.kv.value)
    broken = b"\n" in raw or b"\r" in raw
    return ObjectChange(event.kv.mod_revision, kind, name, orjson.dumps(fields) if broken else raw)


def _record(kind: str) -> Callable[[str, WatchEvent], ObjectChange | None]:
    def project(name: str, event: WatchEvent) -> ObjectChange:
        return _whole(kind, name.partition("/")[2], event)

    return project


def _log_entry(kind: str) -> Callable[[str, WatchEvent], ObjectChange | None]:
    """Entries of a log; that old ones are trimmed is not a change."""
    def project(name: str, event: WatchEvent) -> ObjectChange | None:
        if event.type == "delete":
            return None
        entry = name.partition("/")[2]
        return _whole(kind, str(int(entry)) if kind == "step" else entry, event)

    return project


def _version(name: str, event: WatchEvent) -> ObjectChange | None:
    parts = name.split("/")  # dcs/streams/<stream>/versions/<number>
    if len(parts) != 5 or parts[1] != "streams" or parts[3] != "versions":
        return None
    return _whole("version", f"{parts[2]}/{int(parts[4])}", event)
