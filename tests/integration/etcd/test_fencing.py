"""A writer that has been superseded writes nothing more (I1), on a real etcd."""

from __future__ import annotations

import pytest
from support.waiting import wait_until

from elastic_rl.coordinator.election.election import Election
from elastic_rl.errors import Fenced
from elastic_rl.etcd import event_kinds, events, fencing
from elastic_rl.etcd.client import EtcdClient, KeyValue, Op
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import Engine, EngineState, JobStatus
from elastic_rl.etcd.transaction import Compare, Relation
from elastic_rl.pipeline.records.run_log import JobStatusWriter


def test_job_status_of_an_old_epoch_is_refused(etcd: EtcdClient, keys: Keys) -> None:
    def writer(holder: str) -> fencing.FencedWriter:
        return fencing.FencedWriter.of_epoch(etcd, keys, fencing.raise_epoch(etcd, keys, holder).number)

    old = JobStatusWriter(etcd, keys, writer("first"), steps=9, seed=0)
    old.write("rl", step=3)
    new = JobStatusWriter(etcd, keys, writer("second"), steps=9, seed=0)
    new.write("rl", step=2)
    with pytest.raises(Fenced):
        old.write("rl", step=4)
    found = etcd.get(keys.job_status())
    assert found is not None and JobStatus.decode(found.value).step == 2


def test_fenced_transaction_does_none_of_its_operations(etcd: EtcdClient, keys: Keys) -> None:
    epoch = fencing.raise_epoch(etcd, keys, "first").number
    record = Engine(id="e", pool="rollout", state=EngineState.READY, epoch=epoch)
    fencing.write(etcd, keys, epoch, Op.put(keys.engine("e"), record.encode()))
    fencing.raise_epoch(etcd, keys, "second")
    with pytest.raises(Fenced, match=f"epoch {epoch} of job {keys.job} is over"):
        fencing.write(etcd, keys, epoch, Op.delete(keys.engine("e")), Op.put(keys.engine("f"), b"{}"))
    assert etcd.get(keys.engine("e")) is not None and etcd.get(keys.engine("f")) is None


def test_event_of_an_old_epoch_is_refused_with_its_change(etcd: EtcdClient, keys: Keys) -> None:
    old = FencedWriter.of_epoch(etcd, keys, fencing.raise_epoch(etcd, keys, "first").number)
    written = old.emit(event_kinds.ENGINE_STARTING, "e", "engine e is starting", pid=7,
                       ops=[Op.put(keys.engine("e"), b"1")])
    assert written is not None and written.data == {"pid": 7}
    new = FencedWriter.of_epoch(etcd, keys, fencing.raise_epoch(etcd, keys, "second").number)
    with pytest.raises(Fenced):
        old.emit(event_kinds.ENGINE_DEAD, "e", "engine e is dead", ops=[Op.delete(keys.engine("e"))])
    assert new.emit(event_kinds.ENGINE_READY, "e", "engine e is ready") is not None
    assert [e.kind for e in events.recent(etcd, keys)] == ["engine.starting", "engine.ready"]
    assert etcd.get(keys.engine("e")) is not None


def test_event_of_a_superseded_leader_is_refused(etcd: EtcdClient, keys: Keys) -> None:
    cluster = ClusterKeys(keys.job)
    election = Election(etcd, cluster, "a", "", 60).start()
    try:
        wait_until(lambda: election.is_leader, what="the leader")
        assert election.writer.emit(event_kinds.POOL_SCALED, "rollout", "m") is not None
        held = election.guard
        etcd.delete(cluster.leader("a"))  # its lease ended by etcd's clock, and not yet by its own
        unaware = FencedWriter(etcd, cluster, lambda: held, "the term of replica a")
        with pytest.raises(Fenced, match="the term of replica a is over"):
            unaware.emit(event_kinds.POOL_SCALED, "rollout", "m")
        assert len(events.recent(etcd, cluster)) == 1
    finally:
        election.stop()
    with pytest.raises(Fenced, match="does not lead"):
        election.writer.write(Op.put(keys.root + "x", b""))


def test_failed_comparison_is_distinguished_from_a_fenced_write(etcd: EtcdClient, keys: Keys) -> None:
    key = keys.root + "x"
    writer = FencedWriter.of_epoch(etcd, keys, fencing.raise_epoch(etcd, keys, "first").number)
    assert writer([Compare.absent(key)], [Op.put(key, b"1")])
    assert not writer([Compare.absent(key)], [Op.put(key, b"2")])
    assert writer.emit(event_kinds.POOL_SCALED, "x", "m", compares=[Compare.absent(key)]) is None
    refused = writer.txn([Compare.absent(key)], [Op.put(key, b"2")], [Op.get(key), Op.get(keys.epoch())])
    found = refused.get(key)
    assert not refused.succeeded and found is not None and found.value == b"1"
    assert events.recent(etcd, keys) == []
    fencing.raise_epoch(etcd, keys, "second")
    with pytest.raises(Fenced):
        writer([Compare.absent(key)], [Op.put(key, b"2")])


def test_compare_holds_exactly_when_etcd_says_so(etcd: EtcdClient, keys: Keys) -> None:
    present, absent = keys.root + "present", keys.root + "absent"
    etcd.put(present, b"m")
    etcd.put(present, b"n")
    kv = etcd.get(present)
    assert kv is not None and kv.version == 2
    relations: tuple[Relation, ...] = ("==", "!=", "<", ">")

    def check(compare: Compare, found: KeyValue | None) -> None:
        assert etcd.txn([compare], []).succeeded == compare.holds(found), compare

    for relation in relations:
        for key, found in ((present, kv), (absent, None)):
            for number in (0, 1, 2, 3, kv.create_revision, kv.mod_revision):
                for kind in (Compare.mod, Compare.create, Compare.version):
                    check(kind(key, relation, number), found)
            for value in (b"", b"m", b"n", b"o"):
                check(Compare.value(key, relation, value), found)
