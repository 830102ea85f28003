"""A range of keys that is read when one of them has changed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.changed_range import ChangedRange
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys


def values(found: ChangedRange) -> dict[str, bytes] | None:
    reading = found.read()
    return {kv.key.rpartition("/")[2]: kv.value for kv in reading.kvs} if reading is not None else None


def test_range_is_read_at_first_and_after_each_change(etcd: EtcdClient, keys: Keys) -> None:
    prefix = f"{keys.root}range/"
    etcd.put(f"{prefix}a", b"1")
    found = ChangedRange(etcd, prefix, every_s=3600.0, turn_s=5.0)
    try:
        assert values(found) == {"a": b"1"}
        etcd.put(f"{prefix}b", b"2")
        etcd.put(f"{prefix}c", b"3")
        assert values(found) in ({"a": b"1", "b": b"2", "c": b"3"},)
        etcd.delete(f"{prefix}a")
        while (now := values(found)) is None or "a" in now:
            pass
        assert now == {"b": b"2", "c": b"3"}
        etcd.put(f"{keys.root}other", b"")
        found._turn_s = 0.05
        assert values(found) is None, "none of its keys has changed"
    finally:
        found.close()


def test_range_that_could_not_be_read_is_read_again(tmp_path: Path) -> None:
    servers = EtcdServers(tmp_path, 1)
    try:
        with servers.start().connect(retry_budget_s=0.5) as etcd:
            etcd.put("range/a", b"1")
            found = ChangedRange(etcd, "range/", every_s=0.0, turn_s=0.05)
            assert values(found) == {"a": b"1"}
            servers.kill(0)
            with pytest.raises(EtcdUnavailable):
                found.read()
            servers.restart(0)
            wait_until(lambda: suppressed(found) == {"a": b"1"}, what="the keys")
            found.close()
    finally:
        servers.close()


def suppressed(found: ChangedRange) -> dict[str, bytes] | None:
    with contextlib.suppress(EtcdUnavailable):
        return values(found)
    return None
