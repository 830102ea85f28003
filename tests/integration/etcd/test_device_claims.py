"""Which engines may have device memory, as the waits for it ask a real etcd again and again."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from support.waiting import wait_until

from elastic_rl.config import ROLLOUT_POOL
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.device_claims import DeviceClaims
from elastic_rl.etcd.device_phase import Side
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState

ENGINES = [Engine(id=f"rollout-{i}", pool=ROLLOUT_POOL, state=EngineState.READY, epoch=1, holds_device=True)
           for i in range(3)]


def test_engines_hold_memory_until_their_records_say_otherwise_twice(
        etcd: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in ENGINES:
        etcd.put(keys.engine(engine.id), engine.encode())
    reads: list[str] = []
    read = etcd.range

    def counted(prefix: str, *arguments: Any, **options: Any) -> Any:
        reads.append(prefix)
        return read(prefix, *arguments, **options)

    monkeypatch.setattr(etcd, "range", counted)
    with contextlib.closing(DeviceClaims(etcd, keys, ROLLOUT_POOL, epoch=1)) as claims:
        for left in ([0, 1, 2], [1, 2], [2]):
            wait_until(lambda: sorted(claims.holding()) == [ENGINES[i].id for i in left],  # noqa: B023
                       what="the release")
            for _ in range(10):
                assert claims.holding()
            gone = ENGINES[left[0]]
            etcd.put(keys.engine(gone.id), gone.replace(holds_device=False).encode())
        wait_until(lambda: not claims.holding(), what="the release of the last one")
    assert len(reads) == 2, "once at first, and once to know that none is left"


def test_record_that_cannot_be_read_counts_until_it_is_gone(etcd: EtcdClient, keys: Keys) -> None:
    writer = FencedWriter.of_epoch(etcd, keys, 0)
    etcd.put(keys.engine("rollout-bad"), b"garbage")
    claims = DeviceClaims(etcd, keys, ROLLOUT_POOL, epoch=0)
    assert claims.begin_phase(Side.TRAINER, writer, 1)
    assert "rollout-bad to release memory" in claims.take_for_trainer("group")
    etcd.delete(keys.engine("rollout-bad"))
    wait_until(lambda: not claims.take_for_trainer("group"), what="the trainer's memory")
    assert etcd.get(keys.device_holder()) is not None


def test_engine_of_an_earlier_epoch_or_another_pool_holds_nothing(etcd: EtcdClient, keys: Keys) -> None:
    old, other = ENGINES[0].replace(epoch=0), ENGINES[1].replace(pool="rollout-x")
    for engine in (old, other):
        etcd.put(keys.engine(engine.id), engine.encode())
    claims = DeviceClaims(etcd, keys, ROLLOUT_POOL, epoch=1)
    assert claims.holding() == []
