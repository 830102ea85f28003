"""A range that is read again and again has what etcd has, whatever happened in between."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.etcd import known_range
from elastic_rl.etcd.client import Changed, EtcdClient, KeyValue
from elastic_rl.etcd.known_range import KnownRange


class Etcd:
    """The part of etcd that a range needs. ``sent``: keys that it has sent."""

    def __init__(self) -> None:
        self.now: dict[str, KeyValue] = {}
        self.revision = 1
        self.sent = 0

    def put(self, key: str) -> None:
        self.revision += 1
        before = self.now.get(key)
        self.now[key] = KeyValue(key, b"%d" % self.revision, before.create_revision if before else self.revision,
                                 self.revision, 1, 0)

    def delete(self, key: str) -> None:
        if self.now.pop(key, None) is not None:
            self.revision += 1

    def range(self, prefix: str) -> tuple[list[KeyValue], int]:
        self.sent += len(self.now)
        return [self.now[key] for key in sorted(self.now)], self.revision

    def changed(self, prefix: str, *, since: int, limit: int) -> Changed:
        found = [self.now[key] for key in sorted(self.now) if self.now[key].mod_revision > since]
        self.sent += len(found[:limit])
        return Changed(found[:limit], self.revision, len(self.now), len(found) > limit)


CHANGES = st.lists(st.tuples(st.sampled_from(["put", "put", "delete", "read", "restore"]), st.sampled_from("abcd")),
                   max_size=40)


@given(CHANGES)
def test_each_reading_has_what_etcd_has(changes: list[tuple[str, str]]) -> None:
    etcd, now_s = Etcd(), 0.0
    known = KnownRange(cast(EtcdClient, etcd), "", clock=lambda: now_s)
    for what, key in changes:
        if what == "put":
            etcd.put(key)
        elif what == "delete":
            etcd.delete(key)
        elif what == "restore":  # from a backup, which counts revisions once more, after a while if as many
            now_s += known_range._WHOLE_EVERY_S if known.revision <= 1 else 0.0
            etcd.now, etcd.revision = {}, 1
        else:
            before, found = known.read(), known.read()
            assert found is before, "nothing has changed"
            assert list(found.items()) == sorted(etcd.now.items()) and known.revision == etcd.revision


def test_etcd_sends_what_has_changed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd, now_s = Etcd(), 0.0
    known = KnownRange(cast(EtcdClient, etcd), "", clock=lambda: now_s)
    for key in "abcdef":
        etcd.put(key)

    def sent() -> int:
        before = etcd.sent
        assert list(known.read().items()) == sorted(etcd.now.items())
        return etcd.sent - before

    assert (sent(), sent()) == (6, 0)
    etcd.put("b")
    etcd.put("x")
    assert (sent(), sent()) == (2, 0)
    etcd.delete("c")
    assert sent() == 6, "a key is gone: all are read"
    etcd.delete("b")
    etcd.put("c")
    assert sent() >= 6, "as many keys, and not the same"
    now_s += known_range._WHOLE_EVERY_S
    assert (sent(), sent()) == (6, 0)
    known.forget()
    assert sent() == 6
    monkeypatch.setattr(known_range, "_MAX_CHANGED", 2)
    for key in "abc":
        etcd.put(key)
    assert sent() >= 7
