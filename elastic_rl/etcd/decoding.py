"""Decodes records so that one that cannot be read does not stop the others: it is skipped, and reported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, MutableMapping
from typing import Generic, TypeVar

from pydantic import ValidationError

from elastic_rl.etcd.records import Record
from elastic_rl.etcd.transaction import KeyValue

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)

_MAX_REPORTED = 1000
_reported: dict[str, str] = {}


def decode(kv: KeyValue, kind: type[R], unreadable: MutableMapping[str, str]) -> R | None:
    """The record under a key; None, with the reason in ``unreadable`` under the key, for one that cannot be read."""
    try:
        return kind.decode(kv.value)
    except ValidationError as e:
        unreadable[kv.key] = f"no {kind.__name__}: {_describe(e)}"
        return None


def decode_all(kvs: Iterable[KeyValue], kind: type[R], unreadable: MutableMapping[str, str]
               ) -> list[tuple[R, KeyValue]]:
    """The records that can be read, with their keys; the others are reported in ``unreadable``."""
    return [(record, kv) for kv in kvs if (record := decode(kv, kind, unreadable)) is not None]


def readable(kvs: Iterable[KeyValue | None], kind: type[R], unreadable: dict[str, str] | None = None
             ) -> list[tuple[R, KeyValue]]:
    """The records that can be read, with their keys; None for a key that does not exist is skipped. For processes
    other than the leader: one bad record must not end them, and the leader raises the alert about it. The log has each
    unreadable record once; ``unreadable`` gets why, by key."""
    unreadable = {} if unreadable is None else unreadable
    found = decode_all((kv for kv in kvs if kv is not None), kind, unreadable)
    for key, reason in unreadable.items():
        if _reported.get(key) != reason:
            if len(_reported) >= _MAX_REPORTED:
                _reported.clear()
            _reported[key] = reason
            log.error("ignoring the record at %s: %s", key, reason)
    return found


def readable_one(kv: KeyValue | None, kind: type[R]) -> R | None:
    """The record under one key, as ``readable`` has it; None when there is none that can be read."""
    return next((record for record, _ in readable([kv], kind)), None)


def decode_bytes(raw: bytes, kind: type[R]) -> R | None:
    """A record; None when it cannot be read."""
    try:
        return kind.decode(raw)
    except ValidationError:
        return None


class RangeDecoder(Generic[R]):
    """Decodes the records of one range again and again; a record is decoded again when its value has changed. A
    revision does not tell that: an etcd that was restored from a backup counts them once more."""

    def __init__(self, kind: type[R], key_of: Callable[[R], str] | None = None) -> None:
        """``key_of``: the key that a record must lie under; one that lies elsewhere counts as unreadable."""
        self._kind, self._key_of = kind, key_of
        self._known: dict[str, tuple[bytes, R | None, str]] = {}

    def decode(self, kvs: Iterable[KeyValue], unreadable: MutableMapping[str, str]) -> list[R]:
        """The records that can be read; the others are reported in ``unreadable``, by key."""
        return [record for record, _ in self.decode_with_keys(kvs, unreadable)]

    def decode_with_keys(self, kvs: Iterable[KeyValue], unreadable: MutableMapping[str, str]
                         ) -> list[tuple[R, KeyValue]]:
        """Decodes as ``decode`` does, and gives the key of each record too."""
        known: dict[str, tuple[bytes, R | None, str]] = {}
        found: list[tuple[R, KeyValue]] = []
        for kv in kvs:
            entry = self._known.get(kv.key)
            if entry is None or entry[0] != kv.value:
                entry = self._decode(kv)
            known[kv.key] = entry
            if entry[1] is not None:
                found.append((entry[1], kv))
            else:
                unreadable[kv.key] = entry[2]
        self._known = known  # keys that are gone are forgotten
        return found

    def _decode(self, kv: KeyValue) -> tuple[bytes, R | None, str]:
        reasons: dict[str, str] = {}
        record = decode(kv, self._kind, reasons)
        if record is not None and self._key_of is not None and (key := self._key_of(record)) != kv.key:
            return kv.value, None, f"its record belongs under {key}"
        return kv.value, record, reasons.get(kv.key, "")


def _describe(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}: {first['msg']}{more}" if where else f"{first['msg']}{more}"
