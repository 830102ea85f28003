"""The durable store, a folder or an S3-compatible server: copied to by real nodes, and read from when all is lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import httpx
import pytest
import torch
from support.dcs_cluster import CHUNK, DcsCluster
from support.etcd_server import EtcdServers
from support.shared_fixtures import small_disk
from support.tiers import full
from support.waiting import wait_until

from elastic_rl.dcs.durable.store import DurableStore
from elastic_rl.errors import ChunkCorrupt, Conflict
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.host.processes import spawn, stop
from elastic_rl.net import http_client
from elastic_rl.net.addresses import free_port

BUCKET = "elastic-rl-test"
OTHER_STORE = full(proved_in="tests/integration/dcs/test_dcs_durable.py", why="the same on the other kind of store")


def weights(seed: int) -> dict[str, torch.Tensor]:
    """A few hundred KiB of bf16 that differs in one of a hundred elements from seed to seed."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{i}": torch.randn(40_000, generator=generator).bfloat16() for i in range(3)}
    for tensor in tensors.values():
        tensor[seed::100] += 1.0
    return tensors


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a bucket in a server of our own; the environment says how to reach it, as with any S3."""
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
                return http_client.request("GET", settings["AWS_ENDPOINT_URL"]).status_code < 500
            except httpx.HTTPError:
                return False

        wait_until(answers, what="the S3 server", alive=lambda: server.poll() is None)
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(BUCKET)
        yield f"s3://{BUCKET}/checkpoints"
    finally:
        patch.undo()
        stop(server.pid)
        server.wait(timeout=60)


class DurableCluster(DcsCluster):
    """Nodes that copy to a durable store."""

    def copy_to(self, url: str, *nodes: str) -> None:
        self.start(*nodes, durable_url=url, durable_keep_versions=2, durable_full_every=3)

    def publish_durably(self, *seeds: int, node: str = "a") -> None:
        publisher = self.publisher(node)

        def published(seed: int) -> int:
            try:
                return publisher.publish(weights(seed).items(), meta={"seed": seed}).number
            except Conflict:  # a starved node lost its lease for a moment
                return 0

        for seed in seeds:
            self.await_durable(wait_until(lambda seed=seed: published(seed), what="a publish"))

    def await_durable(self, number: int, stream: str = "policy") -> None:
        wait_until(lambda: self.etcd.get(self.keys.durable(stream, number)) is not None,
                   what=f"the durable copy of {stream} version {number}")

    def kinds(self) -> list[str]:
        """Kinds of the events of the checkpoint service, the oldest first."""
        return [e.kind for e in events.recent(self.etcd, self.keys) if e.kind.startswith("dcs.")]


@pytest.fixture
def dcs(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[DurableCluster]:
    with DurableCluster.open(etcd_servers, etcd, keys, tmp_path) as out:
        yield out


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("s3") if request.param == "s3" else f"file://{tmp_path}/durable"


@pytest.mark.parametrize("url", ["file", pytest.param("s3", marks=OTHER_STORE)], indirect=True)
def test_versions_are_read_from_the_durable_store_when_every_node_is_lost(dcs: DurableCluster, url: str) -> None:
    dcs.copy_to(url, "a")
    dcs.publish_durably(1, 2, 3, 4, 5)
    durable = DurableStore(url, dcs.keys.job)
    wait_until(lambda: durable.numbers("policy") == [4, 5], what="that only the newest two are kept")
    assert [durable.mark("policy", n).anchor for n in (4, 5)] == [4, 4], "the last one is deltas against the anchor"
    assert [b for b in durable.part("policy", 5, 0).objects.values() if b], "no chunk was stored as a delta"
    dcs.kill("a")  # its memory was all it had
    dcs.copy_to(url, "b")
    for number in (5, 4):
        dcs.require(weights(number), number, node="b")


def test_version_is_copied_to_an_s3_server_read_from_it_and_removed(dcs: DurableCluster, s3: str) -> None:
    dcs.copy_to(s3, "a")
    dcs.publish_durably(1)
    dcs.kill("a")
    dcs.copy_to(s3, "b")
    dcs.require(weights(1), 1, node="b")
    durable = DurableStore(s3, dcs.keys.job)
    assert durable.numbers("policy") == [1]
    durable.drop("policy", 1)
    assert durable.numbers("policy") == []
    assert durable.sweep(older_than_s=-60.0) > 0 == durable.sweep(older_than_s=-60.0)


@pytest.mark.parametrize("url", ["file", pytest.param("s3", marks=OTHER_STORE)], indirect=True)
def test_copied_states_of_two_groups_belong_together(dcs: DurableCluster, url: str) -> None:
    dcs.copy_to(url, "a")
    policy, critic = dcs.publisher(stream="trainer_state"), dcs.publisher(stream="critic_state")
    for seed, pair in enumerate(("2/a", "4/b")):
        policy.publish(weights(seed).items(), meta={"pair": pair})
        critic.publish(weights(seed).items(), meta={"pair": pair})
    policy.publish(weights(2).items(), meta={"pair": "6/c"})
    durable = DurableStore(url, dcs.keys.job)
    wait_until(lambda: durable.numbers("critic_state")[-1:] == [2], what="the copy of the newest pair")
    assert durable.numbers("trainer_state")[-1:] == [2], "the newer one has no counterpart"


def test_reference_policy_of_a_state_is_copied_before_it(dcs: DurableCluster, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/durable"
    dcs.start("a", durable_url=url, durable_streams=["trainer_state"])
    policy, state = dcs.publisher(), dcs.publisher(stream="trainer_state")
    for seed in range(1, 4):
        policy.publish(weights(seed).items(), meta={})
    state.publish(weights(0).items(), meta={"reference_version": 2})
    dcs.await_durable(1, "trainer_state")
    assert DurableStore(url, dcs.keys.job).numbers("policy") == [2]
    dcs.kill("a")
    dcs.copy_to(url, "b")
    dcs.require(weights(2), 2, node="b")
    dcs.require(weights(0), 1, node="b", stream="trainer_state")


def test_reference_policy_of_a_state_stays_as_long_as_that_is_kept(dcs: DurableCluster, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/durable"
    durable = DurableStore(url, dcs.keys.job)
    dcs.copy_to(url, "a")
    state = dcs.publisher(stream="trainer_state")

    def publish_state(number: int, reference: int) -> None:
        assert state.publish(weights(0).items(), meta={"reference_version": reference}).number == number
        dcs.await_durable(number, "trainer_state")

    def await_policies(*numbers: int) -> None:
        wait_until(lambda: durable.numbers("policy") == list(numbers), what=f"policies {numbers}")

    dcs.publish_durably(1)
    publish_state(1, reference=1)
    dcs.publish_durably(2, 3, 4, 5, 6)
    await_policies(1, 4, 5, 6)  # 4: the whole one, of which the next two are deltas
    for number in (2, 3, 4, 5):  # the last two are kept; the fourth is whole, so nothing needs the first one
        publish_state(number, reference=5)
    dcs.publish_durably(7)
    await_policies(4, 5, 6, 7)
    dcs.publish_durably(8, 9, 10)
    await_policies(4, 5, 7, 9, 10)


def test_version_published_from_two_hosts_becomes_durable(dcs: DurableCluster, tmp_path: Path) -> None:
    """Each node copies its own part: no node has all of the version."""
    url = f"file://{tmp_path}/durable"
    dcs.copy_to(url, "a", "b")
    version, tensors = dcs.publish_from("ab")
    assert dcs.parts(1) == [["a"], ["b"]]
    dcs.await_durable(1)
    durable = DurableStore(url, dcs.keys.job)
    assert durable.mark("policy", 1).parts == 2
    assert version.manifest in durable.part("policy", 1, 0).objects
    assert dcs.etcd.count(dcs.keys.durable_parts_prefix()) == 0
    dcs.kill("a")
    dcs.kill("b")
    dcs.copy_to(url, "c")
    dcs.require(tensors, 1, node="c")


def test_part_of_a_lost_node_is_copied_by_the_other_that_holds_it(dcs: DurableCluster, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/durable"
    dcs.start("a", "b", disk_bytes=64 << 20)  # without a durable store: nobody copies yet
    _, tensors = dcs.publish_from("ab", replicas=2)
    assert dcs.parts(1) == [["a", "b"], ["b", "a"]]
    dcs.stop("a")
    dcs.stop("b")  # which saves its chunks
    dcs.start("b", disk_bytes=64 << 20, durable_url=url)
    dcs.await_durable(1)
    dcs.kill("b")
    dcs.copy_to(url, "c")
    dcs.require(tensors, 1, node="c")


def test_flipped_bit_in_the_durable_store_never_reaches_a_puller(dcs: DurableCluster, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/durable"
    dcs.copy_to(url, "a")
    dcs.publish_durably(1)
    dcs.kill("a")
    for path in (tmp_path / "durable").rglob("chunks/*/*"):
        if path.stat().st_size > CHUNK // 2:
            data = bytearray(path.read_bytes())
            data[100] ^= 1
            path.write_bytes(data)
    dcs.copy_to(url, "b")
    with pytest.raises(ChunkCorrupt):
        dcs.puller("b").pull("policy")


def test_copy_that_a_killed_node_began_is_completed_by_the_next(dcs: DurableCluster, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/durable"
    folder = tmp_path / "durable" / dcs.keys.job
    dcs.copy_to(url, "a")
    many = {f"w{i}": torch.randn(400_000) for i in range(3)}
    dcs.publisher(chunk_bytes=4096).publish(many.items(), meta={})
    wait_until(lambda: any(folder.glob("chunks/*/*")), what="the first object", poll_s=0.001)
    dcs.processes["a"].kill()
    dcs.processes["a"].wait(60)
    assert not list(folder.glob("versions/*/*")), "it was killed too late: this test has shown nothing"
    assert dcs.etcd.get(dcs.keys.durable("policy", 1)) is None
    dcs.copy_to(url, "a")
    dcs.publish_durably(2)
    assert DurableStore(url, dcs.keys.job).numbers("policy") == [2]


def test_full_durable_store_is_reported_once_and_copying_resumes(dcs: DurableCluster, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "600k") as small:
        filler = small / "filler"
        filler.write_bytes(bytes(500 << 10))
        dcs.copy_to(f"file://{small}/durable", "a", "b")
        version = dcs.publisher("a").publish(weights(1).items(), meta={})
        wait_until(dcs.kinds, what="the report of a full store")
        assert dcs.etcd.get(dcs.keys.durable("policy", version.number)) is None
        filler.unlink()
        dcs.await_durable(version.number)
        wait_until(lambda: len(dcs.kinds()) > 1, what="the report of its recovery")
        assert dcs.kinds() == ["dcs.durable_failed", "dcs.durable_recovered"]
