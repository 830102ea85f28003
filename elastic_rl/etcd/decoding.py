"""Decodes records so that one that cannot be read does not stop the others: it is skipped, and reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Generic, TypeVar

from pydantic import ValidationError

from elastic_rl.etcd.records import Record
from elastic_rl.etcd.transaction import KeyValue

R = TypeVar("R", bound=Record)


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


class RangeDecoder(Generic[R]):
    """Decodes the records of one range again and again; each revision of a record is decoded once."""

    def __init__(self, kind: type[R], key_of: Callable[[R], str] | None = None) -> None:
        """``key_of``: the key that a record must lie under; one that lies elsewhere counts as unreadable."""
        self._kind, self._key_of = kind, key_of
        self._known: dict[str, tuple[int, R | None, str]] = {}

    def decode(self, kvs: Iterable[KeyValue], unreadable: MutableMapping[str, str]) -> list[R]:
        """The records that can be read; the others are reported in ``unreadable``, by key."""
        known: dict[str, tuple[int, R | None, str]] = {}
        found: list[R] = []
        for kv in kvs:
            entry = self._known.get(kv.key)
            if entry is None or entry[0] != kv.mod_revision:
                entry = self._decode(kv)
            known[kv.key] = entry
            if entry[1] is not None:
                found.append(entry[1])
            else:
                unreadable[kv.key] = entry[2]
        self._known = known  # keys that are gone are forgotten
        return found

    def _decode(self, kv: KeyValue) -> tuple[int, R | None, str]:
        reasons: dict[str, str] = {}
        record = decode(kv, self._kind, reasons)
        if record is not None and self._key_of is not None and (key := self._key_of(record)) != kv.key:
            return kv.mod_revision, None, f"its record belongs under {key}"
        return kv.mod_revision, record, reasons.get(kv.key, "")


def _describe(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}: {first['msg']}{more}" if where else f"{first['msg']}{more}"
