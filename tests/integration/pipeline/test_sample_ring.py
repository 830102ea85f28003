"""The ring of samples on a real etcd."""

from __future__ import annotations

import pytest

from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import SampleRecord
from elastic_rl.pipeline.records.sample_ring import MAX_SLOTS, SampleRing


def samples(step: int, count: int = 4) -> list[SampleRecord]:
    return [SampleRecord(step=step, group=step * 8, index=n, prompt=f"{step} + {n} =", response=str(step + n),
                         reward=float(n)) for n in range(count)]


def write(etcd: EtcdClient, keys: Keys, epoch: int, ring: SampleRing, step: int, records: list[SampleRecord]) -> None:
    """Writes the samples as the record of a step does."""
    FencedWriter.of_epoch(etcd, keys, epoch).write(*ring.ops(step, records))


def stored(etcd: EtcdClient, keys: Keys) -> list[tuple[int, int]]:
    """Step and index of every record, ascending."""
    kvs = etcd.range(keys.samples_prefix())[0]
    return sorted((r.step, r.index) for r in map(SampleRecord.decode, (kv.value for kv in kvs)))


@pytest.fixture
def epoch(etcd: EtcdClient, keys: Keys) -> int:
    return fencing.raise_epoch(etcd, keys, "test").number


def test_ring_keeps_the_last_steps_and_never_more_keys_than_slots(etcd: EtcdClient, keys: Keys, epoch: int) -> None:
    ring = SampleRing(etcd, keys, slots=8)
    for step in range(1, 30):
        write(etcd, keys, epoch, ring, step, samples(step, count=9))
        assert len(etcd.range(keys.samples_prefix())[0]) <= 8
    assert stored(etcd, keys) == [(step, n) for step in (28, 29) for n in range(4)]


def test_repeated_step_replaces_what_it_wrote_before(etcd: EtcdClient, keys: Keys, epoch: int) -> None:
    ring = SampleRing(etcd, keys, slots=8)
    write(etcd, keys, epoch, ring, 1, samples(1))
    write(etcd, keys, epoch, ring, 1, samples(1, count=1))
    assert stored(etcd, keys) == [(1, 0)]


@pytest.mark.parametrize("new_ring", [False, True], ids=["same actor", "next actor"])
def test_rewind_deletes_the_samples_of_the_undone_steps(etcd: EtcdClient, keys: Keys, epoch: int, new_ring: bool
                                                        ) -> None:
    ring = SampleRing(etcd, keys, slots=40)
    for step in range(1, 9):
        write(etcd, keys, epoch, ring, step, samples(step, count=1))
    if new_ring:
        ring = SampleRing(etcd, keys, slots=40)
    write(etcd, keys, epoch, ring, 5, samples(5, count=1))
    assert stored(etcd, keys) == [(step, 0) for step in (1, 2, 3, 4, 5)]


def test_first_write_deletes_slots_of_a_larger_ring_and_unreadable_records(etcd: EtcdClient, keys: Keys, epoch: int
                                                                           ) -> None:
    write(etcd, keys, epoch, SampleRing(etcd, keys, slots=MAX_SLOTS), 21, samples(21))
    etcd.put(keys.sample(3), b"\xff")
    write(etcd, keys, epoch, SampleRing(etcd, keys, slots=8), 24, samples(24, count=2))
    assert stored(etcd, keys) == [(24, 0), (24, 1)]
