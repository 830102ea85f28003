"""The leader's reading of events: none is missed, and none is deleted before it was read."""

from __future__ import annotations

import pytest

from elastic_rl.config import parse
from elastic_rl.coordinator.event_reader import MAX_BATCH, EventReader
from elastic_rl.coordinator.failure.statistics import EventCursor
from elastic_rl.coordinator.retention import Retention
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.transaction import batches


def write(etcd: EtcdClient, keys: Keys, count: int) -> None:
    made = [events.build(event_kinds.POOL_SCALED, f"pool-{n}", "m" * 500, at=1000.0 + n) for n in range(count)]
    for batch in batches([events.put_op(keys, event) for event in made]):
        etcd.txn([], batch)


def read_all(etcd: EtcdClient, keys: Keys) -> list[str]:
    """Subjects of the events."""
    subjects: list[str] = []
    while (batch := EventReader(etcd, keys).read()).events:
        subjects += [event.subject for event, _ in batch.events]
        for compare, op in batch.cursor:
            assert etcd.txn([compare], [op]).succeeded
    return subjects


def test_event_that_sorts_into_a_page_that_was_read_is_not_missed(etcd: EtcdClient, keys: Keys,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer's clock is behind, and it is written while the leader reads a backlog of several pages."""
    count = MAX_BATCH - 100
    write(etcd, keys, count)
    page, pages = etcd.page, list[int]()

    def slow_page(*args: object, **options: object) -> object:
        answer = page(*args, **options)
        if options.get("newest_first") is not True and len(pages) < 3:
            pages.append(len(answer.kvs))
            if len(pages) == 1:
                late = [events.build(event_kinds.POOL_SCALED, subject, "m", at=at)
                        for subject, at in (("late", 1.0), ("newest", 9000.0))]
                etcd.txn([], [events.put_op(keys, event) for event in late])
        return answer

    monkeypatch.setattr(etcd, "page", slow_page)
    subjects = read_all(etcd, keys)
    assert len(pages) > 1, "the backlog was read in one page: this test shows nothing"
    assert sorted(subjects) == sorted([*(f"pool-{n}" for n in range(count)), "late", "newest"])


def test_events_that_were_not_read_yet_are_kept(etcd: EtcdClient, keys: Keys) -> None:
    write(etcd, keys, 130)
    kvs = etcd.range(keys.events_prefix())[0]
    cfg = parse({"job": "x", "coordinator": {"max_events": 20}}).coordinator

    def trim() -> int:
        Retention(etcd, keys, cfg, lambda compares, ops: etcd.txn(compares, ops).succeeded, lambda: 0.0).trim()
        return etcd.count(keys.events_prefix())

    assert trim() == 130, "nothing was read"
    first = min(kv.mod_revision for kv in kvs)
    read = sum(kv.mod_revision == first for kv in kvs)
    etcd.txn([], [Op.put(keys.event_cursor(), EventCursor(revision=first).encode())])
    assert 0 < read < 110 and trim() == 130 - read
    etcd.txn([], [Op.put(keys.event_cursor(), EventCursor(revision=kvs[-1].mod_revision).encode())])
    assert trim() == 20


def test_reader_follows_the_cursor_wherever_it_goes(etcd: EtcdClient, keys: Keys) -> None:
    """It is asked for what is new only; a cursor that another leader has moved, or an etcd restored from a backup has
    put back, is followed all the same."""
    reader = EventReader(etcd, keys)

    def subjects(count: int) -> list[str]:
        return sorted(f"pool-{n}" for n in range(count))

    def read() -> list[str]:
        batch = reader.read()
        for compare, op in batch.cursor:
            assert etcd.txn([compare], [op]).succeeded
        return sorted(event.subject for event, _ in batch.events)

    write(etcd, keys, 3)
    assert read() == subjects(3)
    assert read() == []
    write(etcd, keys, 2)
    assert read() == subjects(2)
    etcd.put(keys.event_cursor(), EventCursor(revision=1).encode())
    assert read() == sorted(subjects(3) + subjects(2))
    write(etcd, keys, 2)
    etcd.put(keys.event_cursor(), EventCursor(revision=etcd.revision()).encode())
    assert read() == []
