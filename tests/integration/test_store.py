"""The etcd client against real members, also while they are killed and stopped."""

from __future__ import annotations

import pytest

from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.store import Compare, Op, Store


def test_a_put_can_be_read_listed_and_deleted(store: Store, keys: Keys) -> None:
    revision = store.put(keys.root + "a", b"1")
    kv = store.get(keys.root + "a")
    assert kv is not None and (kv.value, kv.mod_revision, kv.create_revision, kv.version) == (b"1", revision, revision, 1)
    store.put(keys.root + "b", b"2")
    kvs, at = store.range(keys.root)
    assert [k.key for k in kvs] == [keys.root + "a", keys.root + "b"] and at > revision
    assert [k.value for k in store.range(keys.root, newest_first=True, limit=1)[0]] == [b"2"]
    assert store.delete(keys.root + "a") and not store.delete(keys.root + "a")
    assert store.get(keys.root + "a") is None
    assert store.delete_prefix(keys.root) == 1


def test_a_guarded_transaction_runs_only_while_its_guard_holds(store: Store, keys: Keys) -> None:
    key = keys.root + "x"
    made = store.txn([Compare.absent(key)], [Op.put(key, b"first")])
    again = store.txn([Compare.absent(key)], [Op.put(key, b"second")], [Op.get(key)])
    assert made.succeeded and not again.succeeded
    assert again.kvs[0].value == b"first" and again.kvs[0].mod_revision == made.revision
    assert store.txn([Compare.mod(key, "==", made.revision)], [Op.put(key, b"third")]).succeeded
    assert not store.txn([Compare.mod(key, "==", made.revision)], [Op.put(key, b"late")]).succeeded
