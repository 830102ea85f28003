"""Copies that a node took with it are made again on other real nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.dcs_nodes import Nodes
from support.etcd_server import EtcdServers

from elastic_rl.dcs import catalog
from elastic_rl.dcs.catalog.repair import Repairer, RepairThread
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import Compare, EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.host.processes import stop
from elastic_rl.runtime import wait_until


def model(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(30_000, generator=generator) for i in range(3)}


@dataclass(kw_only=True)
class Fleet(Nodes):
    """Nodes of one job, two copies of each version, and the one who repairs."""

    hub: DcsClient
    repairer: Repairer

    def start(self, *nodes: str, **dcs: object) -> None:
        for node in nodes:
            self.start_node(node, **dcs)

    def kill(self, node: str) -> None:
        """Ends a node for good and waits until its registration is over."""
        super().kill(node)
        wait_until(lambda: node not in [n.id for n in self.hub.nodes()], timeout_s=20, what=f"the end of node {node}")

    def holders(self, number: int) -> list[str]:
        """Nodes of the version's record, after a look at what they really have."""
        version = catalog.get_version(self.etcd, self.keys, "policy", number)
        assert version is not None
        return [n for n in version.nodes if not self.hub.connect(n).has([version.manifest])]

    def require(self, number: int, node: str) -> None:
        puller = Puller(self.etcd, self.keys, "test", pin_ttl_s=5, io_timeout_s=20, node=node)
        with puller, puller.pull("policy", number) as pulled:
            found = dict(pulled.tensors())
            assert all(torch.equal(found[n], t) for n, t in model(number).items())

    def close(self) -> None:
        self.hub.close()
        super().close()


@pytest.fixture
def fleet(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[Fleet]:
    hub = DcsClient(etcd, keys, io_timeout_s=20)
    out = Fleet(etcd_servers=etcd_servers, etcd=etcd, keys=keys, folder=tmp_path, hub=hub,
                repairer=Repairer(etcd, keys, hub, replicas=2))
    try:
        yield out
    finally:
        out.close()


def publish(fleet: Fleet, *seeds: int) -> None:
    epoch = fencing.raise_epoch(fleet.etcd, fleet.keys, "test").number
    with Publisher(fleet.etcd, fleet.keys, "policy", epoch=epoch, owner="test", chunk_bytes=64 << 10, replicas=2,
                   staging_ttl_s=5, io_timeout_s=20, node="a") as publisher:
        for seed in seeds:
            publisher.publish(model(seed).items(), meta={})


@pytest.mark.timeout(120)
def test_versions_survive_the_loss_of_both_their_nodes_one_after_the_other(fleet: Fleet) -> None:
    fleet.start("a", "b", "c")
    publish(fleet, 1, 2)
    [other] = [n for n in fleet.holders(1) if n != "a"]
    fleet.kill("a")
    lines = fleet.repairer.round([])
    assert len(lines) == 2 and all("copied policy version" in line for line in lines)
    assert all(len(fleet.holders(n)) == 2 and "a" not in fleet.holders(n) for n in (1, 2))
    assert fleet.repairer.round([]) == [], "what is whole was repaired again"
    head = catalog.head(fleet.etcd, fleet.keys, "policy")
    assert head == catalog.get_version(fleet.etcd, fleet.keys, "policy", 2), "the head's two records differ"
    fleet.kill(other)
    [last] = {"b", "c"} - {other}
    for number in (1, 2):
        fleet.require(number, last)
    assert "has 1 of 2 copies" in fleet.repairer.round([])[0]


@pytest.mark.timeout(120)
def test_a_node_that_came_back_with_its_disk_counts_and_one_without_does_not(fleet: Fleet) -> None:
    fleet.start("a")
    fleet.start("b", disk_bytes=64 << 20)
    publish(fleet, 1)
    assert sorted(fleet.holders(1)) == ["a", "b"]
    fleet.hub.connect("b").call({"op": "persist", "digests": [catalog.head(  # type: ignore[union-attr]
        fleet.etcd, fleet.keys, "policy").manifest]})
    stop(fleet.processes["b"].pid)  # which saves the rest
    fleet.start("b", disk_bytes=64 << 20)
    assert fleet.repairer.round([]) == [] and sorted(fleet.holders(1)) == ["a", "b"]
    fleet.kill("a")
    fleet.start("a")
    assert fleet.repairer.round([]) == ["copied policy version 1 to node a"]
    assert sorted(fleet.holders(1)) == ["a", "b"]


@pytest.mark.timeout(120)
def test_one_who_no_longer_leads_changes_no_record_and_the_thread_does_what_it_is_kicked_to(fleet: Fleet) -> None:
    fleet.start("a", "b", "c")
    publish(fleet, 1)
    before = catalog.head(fleet.etcd, fleet.keys, "policy")
    [other] = [n for n in fleet.holders(1) if n != "a"]
    fleet.kill(other)
    fleet.repairer.round([Compare.exists(fleet.keys.leader("nobody"))])
    assert catalog.head(fleet.etcd, fleet.keys, "policy") == before
    thread = RepairThread(Repairer(fleet.etcd, fleet.keys, fleet.hub, replicas=2))
    thread.start()
    thread.kick([])
    wait_until(lambda: other not in (catalog.head(fleet.etcd, fleet.keys, "policy") or before).nodes,  # type: ignore
               timeout_s=30, what="the repair")
    thread.close()
    assert not thread.is_alive()
    assert len(fleet.holders(1)) == 2
