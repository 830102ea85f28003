"""etcd loses its data, or goes back to an old backup, under nodes that hold versions: no chunk is dropped, no number is
used twice, and the catalog is rebuilt from the nodes' disks or the durable store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.dcs_cluster import DcsCluster, Tensors, model
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl.dcs.catalog.repair import Repairer
from elastic_rl.dcs.durable.store import DurableStore
from elastic_rl.dcs.versions import recovery
from elastic_rl.errors import CatalogMismatch, VersionNotFound
from elastic_rl.etcd import event_kinds, events, fencing
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import VersionState

SWEEPS = 5
DISK = {"disk_bytes": 64 << 20}


@dataclass(kw_only=True)
class LossyCluster(DcsCluster):
    """A cluster whose etcd can lose its data."""

    def save_etcd(self) -> Path:
        """A backup of etcd's data, as it is now."""
        self.etcd_servers.kill(0)
        backup = shutil.copytree(self.etcd_servers.data(0), self.folder / "backup")
        self.etcd_servers.restart(0)
        self.await_nodes()
        return backup

    def lose_etcd(self, backup: Path | None = None) -> None:
        """etcd starts again, on a backup or on nothing; the nodes live on and register again."""
        self.etcd_servers.kill(0)
        shutil.rmtree(self.etcd_servers.data(0))
        if backup is not None:
            shutil.copytree(backup, self.etcd_servers.data(0))
        self.etcd_servers.restart(0)
        self.etcd.close()
        self.etcd = self.stack.enter_context(self.etcd_servers.connect())
        self.await_nodes()

    def await_nodes(self) -> None:
        living = {n: p.pid for n, p in self.processes.items() if p.poll() is None}
        wait_until(lambda: {n.id: n.pid for n in self.registered()} == living, what="the nodes")

    def chunks(self) -> dict[str, int]:
        return {n: self.stat(n)["chunks"] for n, p in self.processes.items() if p.poll() is None}

    def maintain(self) -> list[str]:
        """What a leader does, several times over; what its last sweep reported."""
        collector, client = self.collector(keep_versions=1), self.client()
        for _ in range(SWEEPS):
            lines = collector.sweep([])
            Repairer(self.etcd, self.keys, client, replicas=1).round([])
        return lines

    def mismatches(self) -> list[str]:
        return [e.message for e in events.recent(self.etcd, self.keys)
                if e.kind == event_kinds.DCS_CATALOG_MISMATCH.name]

    def recover(self, durable: DurableStore | None = None) -> recovery.RecoveryPlan:
        return recovery.recover(self.etcd, self.keys, self.client(), durable, holder="test")


@pytest.fixture
def dcs(tmp_path: Path, keys: Keys) -> Iterator[LossyCluster]:
    servers = EtcdServers(tmp_path / "etcd", 1).start()
    try:
        etcd = servers.connect()
        with LossyCluster.open(servers, etcd, keys, tmp_path) as out:
            yield out
        etcd.close()
    finally:
        servers.close()


def test_etcd_that_lost_its_data_costs_nothing(dcs: LossyCluster) -> None:
    dcs.start("a", "b", **DISK)
    dcs.publish(1, 2)
    _, spread = dcs.publish_from("ab", stream="trainer_state")
    dcs.maintain()  # so that both nodes have noted all versions, and version 1 is gone
    epoch, before = dcs.epoch, dcs.chunks()
    dcs.lose_etcd()

    lines = dcs.maintain()
    assert dcs.chunks() == before, "chunks were dropped for a catalog that does not know them"
    assert any("holds versions of catalog" in line and "elastic-rl versions recover" in line for line in lines)
    assert any("elastic-rl versions recover" in message for message in dcs.mismatches())
    fencing.raise_epoch(dcs.etcd, dcs.keys, "a trainer that starts from nothing")
    with pytest.raises(CatalogMismatch, match="elastic-rl versions recover"):
        dcs.publish(9)

    planned = dcs.recover()
    assert {(r.version.stream, r.version.number) for r in planned.versions} == {("policy", 2), ("trainer_state", 1)}
    assert planned.lost == [] and dcs.epoch > epoch
    for node in ("a", "b"):
        dcs.require(model(2), 2, node=node)
        dcs.require(spread, 1, node=node, stream="trainer_state")
    assert dcs.parts(1, "trainer_state") == [["a"], ["b"]]
    assert dcs.maintain() == [] and dcs.head().number == 2

    version = dcs.publish(3)
    assert version.number > 2, "a number was used twice"
    dcs.maintain()
    dcs.require(model(3), node="b")
    with pytest.raises(VersionNotFound):
        dcs.require(model(2), 2)
    dcs.require(spread, 1, node="b", stream="trainer_state")


def test_power_cut_that_also_takes_etcd_is_recovered_from_disks(dcs: LossyCluster) -> None:
    dcs.start("a", "b", **DISK)
    dcs.publish(1)
    _, spread = dcs.publish_from("ab", stream="trainer_state")
    for node in ("a", "b"):
        dcs.await_stat(node, unsaved=0)
        dcs.kill(node)
    dcs.lose_etcd()
    dcs.start("a", "b", **DISK)
    before = dcs.chunks()
    dcs.maintain()
    assert dcs.chunks() == before

    dcs.stop("b")
    planned = dcs.recover()
    assert [(v.stream, why) for v, why in planned.lost] == [("trainer_state", "1 of 2 parts are on no registered node")]
    dcs.require(model(1), 1)
    dcs.maintain()
    dcs.start("b", **DISK)  # which was away, and brings the rest
    dcs.maintain()
    assert dcs.recover().lost == []
    dcs.require(model(1), 1, node="b")
    dcs.require(spread, 1, stream="trainer_state")


def test_etcd_restored_from_an_old_backup_is_suspended_and_recovered(dcs: LossyCluster) -> None:
    dcs.start("a", **DISK)
    dcs.publish(1, 2)
    backup = dcs.save_etcd()
    publisher = dcs.publisher("a")
    published: dict[int, Tensors] = {publisher.publish(model(seed).items(), meta={}).number: model(seed)
                                     for seed in (3, 4)}
    dcs.maintain()
    dcs.stop("a")  # else its lease, which is in the backup, would decide when it registers again
    dcs.lose_etcd(backup)
    dcs.start("a", **DISK)
    before = dcs.chunks()
    assert dcs.head().number == 2, "the backup is not older: this test has shown nothing"

    lines = dcs.maintain()
    assert dcs.chunks() == before
    assert any("was etcd restored from an old backup?" in message for message in dcs.mismatches())
    assert any("suspended" in line for line in lines)
    with pytest.raises(CatalogMismatch, match="suspended"):
        dcs.publish(9)

    planned = dcs.recover()
    assert [r.version.number for r in planned.versions] == [4]
    assert [v.number for v, _ in planned.lost] == [1, 2]  # which were released after the backup
    dcs.require(published[4])
    assert dcs.publish(5).number > 4
    dcs.maintain()
    dcs.require(model(5))
    assert dcs.states()[1] is dcs.states()[2] is VersionState.GONE


def test_everything_but_the_durable_store_is_lost(dcs: LossyCluster) -> None:
    url = f"file://{dcs.folder}/durable"
    dcs.start("a", "b", durable_url=url)
    _, spread = dcs.publish_from("ab")
    wait_until(lambda: dcs.etcd.get(dcs.keys.durable("policy", 1)) is not None, what="the durable copy")
    for node in ("a", "b"):
        dcs.kill(node)
    dcs.lose_etcd()
    dcs.start("c", durable_url=url)
    planned = dcs.recover(DurableStore(url, dcs.keys.job))
    assert [(r.version.number, r.durable) for r in planned.versions] == [(1, True)]
    Repairer(dcs.etcd, dcs.keys, dcs.client(), replicas=1).round([])
    assert dcs.parts(1) == [["c"], ["c"]], "repair brings it back to a node"
    dcs.require(spread, 1, node="c")
    assert dcs.publish(2, node="c").number > 1


def test_interrupted_recovery_is_run_again(dcs: LossyCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    dcs.start("a", **DISK)
    dcs.publish(1, 2)
    dcs.lose_etcd()

    class Interrupted(Exception):
        pass

    def interrupt(*args: object) -> None:
        raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(recovery, "_ops", interrupt)
        with pytest.raises(Interrupted):
            dcs.recover()
    with pytest.raises(CatalogMismatch, match="a recovery is under way, or was interrupted"):
        dcs.publish(9)
    before = dcs.chunks()
    dcs.maintain()
    assert dcs.chunks() == before
    assert [r.version.number for r in dcs.recover().versions] == [1, 2]
    dcs.require(model(2))


def test_memory_only_node_protects_its_chunks_too(dcs: LossyCluster) -> None:
    dcs.start("a")
    dcs.publish(1)
    dcs.lose_etcd()
    before = dcs.chunks()
    dcs.maintain()
    assert dcs.chunks() == before
    dcs.recover()
    with dcs.puller().pull("policy") as pulled:
        assert torch.equal(dict(pulled.tensors())["big"], model(1)["big"])
