"""Ranges that are read again and again have what etcd has, whatever happened in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.errors import Compacted, EtcdUnavailable
from elastic_rl.etcd import known_ranges
from elastic_rl.etcd.client import Changed, ChangedRanges, EtcdClient, KeyValue
from elastic_rl.etcd.known_ranges import KnownRanges

PREFIXES, SINGLE = ("a/", "b/"), "single"


class Etcd:
    """The part of etcd that ranges need. ``sent``: keys of ranges that it has sent."""

    def __init__(self) -> None:
        self.now: dict[str, KeyValue] = {}
        self.revision = 1
        self.sent = self.compactions = 0

    def put(self, key: str) -> None:
        self.revision += 1
        before = self.now.get(key)
        self.now[key] = KeyValue(key, b"%d" % self.revision, before.create_revision if before else self.revision,
                                 self.revision, 1, 0)

    def delete(self, key: str) -> None:
        if self.now.pop(key, None) is not None:
            self.revision += 1

    def under(self, prefix: str) -> list[KeyValue]:
        return [self.now[key] for key in sorted(self.now) if key.startswith(prefix)]

    def range(self, prefix: str, *, revision: int) -> tuple[list[KeyValue], int]:
        assert revision == self.revision, "as of the revision of the rest"
        if self.compactions:
            self.compactions -= 1
            raise Compacted("overtaken")
        self.sent += len(self.under(prefix))
        return self.under(prefix), revision

    def changed(self, prefixes: Sequence[str], keys: Sequence[str], *, since: int, limit: int) -> ChangedRanges:
        ranges = []
        for prefix in prefixes:
            found = [kv for kv in self.under(prefix) if kv.mod_revision > since]
            self.sent += len(found[:limit])
            ranges.append(Changed(found[:limit], len(self.under(prefix)), len(found) > limit))
        return ChangedRanges(ranges, [self.now[key] for key in keys if key in self.now], self.revision)

    def require_same(self, known: KnownRanges) -> None:
        assert {p: list(kvs.items()) for p, kvs in known.ranges.items()} == {
            p: [(kv.key, kv) for kv in self.under(p)] for p in PREFIXES}
        assert known.keys == {key: self.now[key] for key in (SINGLE,) if key in self.now}
        assert known.revision == self.revision


CHANGES = st.lists(st.tuples(st.sampled_from(["put", "put", "delete", "read", "restore", "compacted"]),
                             st.sampled_from(["a/1", "a/2", "a/3", "b/1", "b/2", SINGLE, "elsewhere"])), max_size=40)


@given(CHANGES)
def test_each_reading_has_what_etcd_has(changes: list[tuple[str, str]]) -> None:
    etcd, now_s = Etcd(), 0.0
    known = KnownRanges(cast(EtcdClient, etcd), PREFIXES, [SINGLE], clock=lambda: now_s)
    for what, key in changes:
        if what == "put":
            etcd.put(key)
        elif what == "delete":
            etcd.delete(key)
        elif what == "compacted":
            etcd.compactions = known_ranges._MAX_READS - 1
        elif what == "restore":  # from a backup, which counts revisions once more, and comes as far after a while
            now_s += known_ranges._WHOLE_EVERY_S
            etcd.now, etcd.revision = {}, 1
        else:
            known.read()
            before = dict(known.ranges)
            known.read()
            assert all(known.ranges[prefix] is before[prefix] for prefix in PREFIXES), "nothing has changed"
            etcd.require_same(known)


def test_a_reading_that_fails_changes_nothing() -> None:
    etcd = Etcd()
    known = KnownRanges(cast(EtcdClient, etcd), PREFIXES, [SINGLE])
    for key in ("a/1", "b/1", SINGLE):
        etcd.put(key)
    known.read()
    before = known.revision, dict(known.ranges), known.keys
    etcd.put("a/2")
    etcd.delete("b/1")
    etcd.compactions = known_ranges._MAX_READS
    with pytest.raises(EtcdUnavailable):
        known.read()
    assert (known.revision, known.ranges, known.keys) == before
    known.read()
    etcd.require_same(known)


def test_etcd_that_was_restored_from_a_backup_is_read_whole() -> None:
    etcd = Etcd()
    known = KnownRanges(cast(EtcdClient, etcd), PREFIXES, [SINGLE], clock=lambda: 0.0)
    for key in ("a/1", "b/1", "a/1"):
        etcd.put(key)
    known.read()
    backup = Etcd()
    backup.put("a/1")
    backup.put("b/1")
    etcd.now, etcd.revision = backup.now, backup.revision  # as many keys, with other values
    known.read()
    etcd.require_same(known)


def test_etcd_sends_what_has_changed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd, now_s = Etcd(), 0.0
    known = KnownRanges(cast(EtcdClient, etcd), PREFIXES, [SINGLE], clock=lambda: now_s)
    for key in "123456":
        etcd.put(f"a/{key}")
    etcd.put("b/1")

    def sent() -> int:
        before = etcd.sent
        known.read()
        etcd.require_same(known)
        return etcd.sent - before

    assert sent() >= 7
    assert sent() == 0
    etcd.put("a/2")
    etcd.put("a/x")
    assert (sent(), sent()) == (2, 0)
    etcd.delete("a/3")
    assert sent() == 6, "a key is gone: all of its range are read"
    etcd.delete("a/2")
    etcd.put("a/3")
    assert sent() >= 6, "as many keys, and not the same"
    now_s += known_ranges._WHOLE_EVERY_S
    assert (sent(), sent()) == (7, 0)
    known.forget()
    assert sent() == 7
    monkeypatch.setattr(known_ranges, "_MAX_CHANGED", 2)
    for key in "134":
        etcd.put(f"a/{key}")
    assert sent() >= 6
