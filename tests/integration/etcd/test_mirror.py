"""Records kept current by a watch: the same as a read of the range, through outages and compactions."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from support.etcd_server import EtcdServers

from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.mirror import Mirror
from elastic_rl.etcd.records import Engine, EngineState
from elastic_rl.etcd.transaction import KeyValue
from elastic_rl.pipeline.rollout_pool import PoolWatch


def test_mirror_equals_the_range_after_any_changes(etcd: EtcdClient, keys: Keys) -> None:
    prefix, chance, decoded = keys.root + "mirrored/", random.Random(7), list[str]()

    def decode(kv: KeyValue) -> bytes | None:
        decoded.append(kv.key)
        return None if kv.value == b"hidden" else kv.value

    with Mirror(etcd, prefix, decode) as mirror:
        for _ in range(40):
            changes = chance.randrange(4)
            for _ in range(changes):
                key = prefix + str(chance.randrange(6))
                if chance.random() < 0.3:
                    etcd.delete(key)
                else:
                    etcd.put(key, chance.choice([b"a", b"b", b"hidden"]))
            etcd.put(prefix + "last", str(time.monotonic_ns()).encode())
            expected = {kv.key: kv.value for kv in etcd.range(prefix)[0] if kv.value != b"hidden"}
            _await(lambda: dict(mirror.read(1.0)) == expected)  # noqa: B023
        assert len(decoded) < 40 * 5, "unchanged values were decoded again"
        before = len(decoded)
        began = time.monotonic()
        mirror.read(0.3)
        assert time.monotonic() - began >= 0.3 and len(decoded) == before


def test_mirror_that_missed_compacted_changes_reads_all_again(etcd: EtcdClient, keys: Keys) -> None:
    prefix = keys.root + "mirrored/"
    etcd.put(prefix + "goes", b"1")
    with Mirror(etcd, prefix, lambda kv: kv.value) as mirror:
        assert dict(mirror.read(0)) == {prefix + "goes": b"1"}
        mirror._watch.close()  # type: ignore[union-attr]
        old = etcd.range(prefix)[1]
        etcd.delete(prefix + "goes")
        revision = etcd.put(prefix + "comes", b"2")
        etcd.compact(revision)
        mirror._watch = etcd.watch(prefix, start_revision=old)  # as one that was cut off meanwhile and goes on there
        _await(lambda: dict(mirror.read(1.0)) == {prefix + "comes": b"2"})


def test_pool_is_unknown_while_etcd_is_silent_and_known_after_it(tmp_path: Path, keys: Keys) -> None:
    servers = EtcdServers(tmp_path / "etcd", 1).start()
    try:
        with servers.connect(call_timeout_s=1.0) as etcd, ExitStack() as held:
            pool = held.enter_context(closing(PoolWatch(etcd, keys)))
            engine = Engine(id="rollout-e", pool="rollout", state=EngineState.READY, epoch=1)
            etcd.put(keys.engine("rollout-e"), engine.encode())
            assert pool.engines(0) == [engine]
            etcd.put(keys.engine("rollout-bad"), b"garbage")
            assert pool.engines(1.0) == [engine]
            servers.stop(0)
            with pytest.raises(EtcdUnavailable, match="no sign of life"):
                while True:
                    assert pool.engines(0.2) == [engine]
            servers.cont(0)
            dead = engine.replace(state=EngineState.DEAD)
            etcd.put(keys.engine("rollout-e"), dead.encode())
            _await(lambda: _known(pool) == [dead])
    finally:
        servers.close()


def _known(pool: PoolWatch) -> list[Engine]:
    try:
        return pool.engines(0.2)
    except EtcdUnavailable:
        return []


def _await(check: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not check():
        assert time.monotonic() < end, "it did not come"
