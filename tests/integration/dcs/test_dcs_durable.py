"""Versions outside the nodes: in a folder and in an S3-compatible server, copied by real nodes, and brought back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
import httpx
import pytest
import torch
from support.dcs_nodes import Nodes
from support.etcd_server import EtcdServers
from support.shared_fixtures import small_disk

from elastic_rl.dcs import catalog
from elastic_rl.dcs.durable.store import DurableStore
from elastic_rl.dcs.durable.uploader import restore
from elastic_rl.dcs.fetch.puller import Pulled, Puller
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.errors import ChunkCorrupt, Conflict, Fenced
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode
from elastic_rl.host.processes import spawn, stop
from elastic_rl.runtime import free_port, wait_until

CHUNK = 64 << 10
BUCKET = "elastic-rl-test"


def model(seed: int) -> dict[str, torch.Tensor]:
    """A few hundred KiB of bf16 that changes in one of a hundred elements from seed to seed."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{i}": torch.randn(40_000, generator=generator).bfloat16() for i in range(3)}
    for tensor in tensors.values():
        tensor[seed::100] += 1.0
    return tensors


def assert_same(pulled: Pulled, seed: int) -> None:
    found, wanted = dict(pulled.tensors()), model(seed)
    assert found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a bucket in a server of our own; how to reach it is in the environment, as with any S3."""
    port = free_port()
    log = tmp_path_factory.mktemp("s3") / "server.log"
    server = spawn([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], log=log)
    settings = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    patch = pytest.MonkeyPatch()
    try:
        for name, value in settings.items():
            patch.setenv(name, value)

        def answers() -> bool:
            try:
                return httpx.get(settings["AWS_ENDPOINT_URL"]).status_code < 500
            except httpx.HTTPError:
                return False

        wait_until(answers, timeout_s=60, what="the S3 server", alive=lambda: server.poll() is None)
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(BUCKET)
        yield f"s3://{BUCKET}/checkpoints"
    finally:
        patch.undo()
        stop(server.pid)
        server.wait(timeout=10)


@dataclass(kw_only=True)
class Hub(Nodes):
    """Nodes that copy to a durable store."""

    epoch: int

    def start(self, node: str, url: str, **dcs: object) -> DcsNode:
        return self.start_node(node, durable_url=url, durable_keep=2, durable_anchor_every=3, **dcs)

    def publish(self, *seeds: int, node: str = "a", stream: str = "policy") -> None:
        with Publisher(self.etcd, self.keys, stream, epoch=self.epoch, owner="test", chunk_bytes=CHUNK,
                       staging_ttl_s=5, io_timeout_s=10, node=node) as publisher:
            for seed in seeds:
                version = publisher.publish(model(seed).items(), meta={"seed": seed})
                self.await_durable(version.number, stream)

    def puller(self, node: str) -> Puller:
        return Puller(self.etcd, self.keys, "test", pin_ttl_s=5, io_timeout_s=20, node=node)

    def await_durable(self, number: int, stream: str = "policy") -> None:
        wait_until(lambda: self.etcd.get(self.keys.durable(stream, number)) is not None, timeout_s=60,
                   what=f"the durable copy of {stream} {number}")


@pytest.fixture
def hub(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[Hub]:
    out = Hub(etcd_servers=etcd_servers, etcd=etcd, keys=keys, folder=tmp_path,
              epoch=fencing.raise_epoch(etcd, keys, "test").number)
    try:
        yield out
    finally:
        out.close()


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("s3") if request.param == "s3" else f"file://{tmp_path}/durable"


@pytest.mark.timeout(180)
def test_a_hub_that_lost_every_node_has_its_versions_from_the_durable_store(hub: Hub, url: str) -> None:
    hub.start("a", url)
    hub.publish(1, 2, 3, 4, 5)
    durable = DurableStore(url, hub.keys.job)
    wait_until(lambda: durable.numbers("policy") == [4, 5], timeout_s=60, what="that only the newest two are kept")
    assert [durable.mark("policy", n).anchor for n in (4, 5)] == [4, 4], "the last one is deltas against the anchor"
    assert [b for b in durable.mark("policy", 5).objects.values() if b], "no chunk was told as a delta"
    hub.kill("a")  # its memory was all it had
    hub.start("b", url)
    for number in (5, 4):
        with hub.puller("b") as puller, puller.pull("policy", number) as pulled:
            assert_same(pulled, number)


@pytest.mark.timeout(120)
def test_a_catalog_that_was_lost_is_restored_under_its_numbers_and_goes_on_above_them(
        hub: Hub, etcd: EtcdClient, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/durable"
    hub.start("a", url)
    hub.publish(1, 2, 3, 4)
    durable = DurableStore(url, hub.keys.job)
    with pytest.raises(Conflict, match="already"):
        restore(etcd, hub.keys, durable, "policy", epoch=hub.epoch)
    hub.kill("a")
    etcd.delete_prefix(hub.keys.root)
    hub.epoch = fencing.raise_epoch(etcd, hub.keys, "after").number
    fencing.raise_epoch(etcd, hub.keys, "another")
    with pytest.raises(Fenced):
        restore(etcd, hub.keys, durable, "policy", epoch=hub.epoch)
    hub.epoch += 1
    kept = durable.numbers("policy")
    assert [v.number for v in restore(etcd, hub.keys, durable, "policy", epoch=hub.epoch)] == kept
    hub.start("b", url)
    with hub.puller("b") as puller, puller.pull("policy") as pulled:
        assert pulled.version.number == 4
        assert_same(pulled, 4)
    hub.publish(9, node="b")
    head = catalog.head(etcd, hub.keys, "policy")
    assert head is not None and head.number == 5


@pytest.mark.timeout(120)
def test_a_flipped_bit_in_the_durable_store_never_reaches_a_puller(hub: Hub, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/durable"
    hub.start("a", url)
    hub.publish(1)
    hub.kill("a")
    for path in (tmp_path / "durable").rglob("chunks/*/*"):
        if path.stat().st_size > CHUNK // 2:
            data = bytearray(path.read_bytes())
            data[100] ^= 1
            path.write_bytes(data)
    hub.start("b", url)
    with hub.puller("b") as puller, pytest.raises(ChunkCorrupt):
        puller.pull("policy")


@pytest.mark.timeout(120)
def test_a_node_that_dies_in_mid_copy_leaves_no_version_and_the_next_one_ends_the_work(
        hub: Hub, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/durable"
    folder = tmp_path / "durable" / hub.keys.job
    hub.start("a", url)
    with Publisher(hub.etcd, hub.keys, "policy", epoch=hub.epoch, owner="test", chunk_bytes=4096, staging_ttl_s=5,
                   io_timeout_s=10, node="a") as publisher:
        publisher.publish(model(1).items(), meta={})
        wait_until(lambda: any(folder.glob("chunks/*/*")), timeout_s=30, what="the first object", poll_s=0.001)
        hub.kill("a")
    assert not list(folder.glob("versions/*/*")), "it was killed too late: this test has shown nothing"
    assert hub.etcd.get(hub.keys.durable("policy", 1)) is None
    hub.start("a", url)
    hub.publish(2)
    assert DurableStore(url, hub.keys.job).numbers("policy") == [2]


@pytest.mark.timeout(120)
def test_a_full_durable_store_is_told_once_and_copying_goes_on_when_there_is_room(hub: Hub, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "600k") as small:
        filler = small / "filler"
        filler.write_bytes(bytes(500 << 10))
        hub.start("a", f"file://{small}/durable")
        with Publisher(hub.etcd, hub.keys, "policy", epoch=hub.epoch, owner="test", chunk_bytes=CHUNK,
                       staging_ttl_s=5, io_timeout_s=10, node="a") as publisher:
            version = publisher.publish(model(1).items(), meta={})

        def kinds() -> list[str]:
            return [e.kind for e in events.recent(hub.etcd, hub.keys) if e.kind.startswith("dcs.")]

        wait_until(kinds, timeout_s=30, what="the report of a full store")
        assert hub.etcd.get(hub.keys.durable("policy", version.number)) is None
        filler.unlink()
        hub.await_durable(version.number)
        wait_until(lambda: len(kinds()) > 1, timeout_s=30, what="the report of its recovery")
        assert kinds() == ["dcs.durable_failed", "dcs.durable_recovered"]
