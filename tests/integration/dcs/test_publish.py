"""Publishing by several ranks to several nodes, in the background: a version becomes visible whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from publish_rank import STREAMS, TENSORS, tensor
from support.dcs_cluster import CHUNK, DcsCluster
from support.etcd_server import EtcdServers
from support.forked import ForkedProcess
from support.tiers import full, parametrize
from support.waiting import wait_until

from elastic_rl.config import DcsConfig
from elastic_rl.dcs.catalog import garbage_collector, pins, reads, writer
from elastic_rl.dcs.catalog.garbage_collector import GarbageCollector
from elastic_rl.dcs.catalog.retention import RetentionPolicy
from elastic_rl.dcs.publish import publisher
from elastic_rl.dcs.publish.part_writer import LocalArena, PartWriter
from elastic_rl.errors import ChunkMissing, Fenced
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import VersionState
from elastic_rl.net.addresses import free_port
from elastic_rl.runtime import failpoints
from elastic_rl.trainer.checkpoint.async_publish import AsyncPublisher, InFlightPublish
from elastic_rl.trainer.checkpoint.owned_tensors import OwnedTensorWriter
from elastic_rl.trainer.megatron.parallel import ParallelDims

ALONE = ParallelDims(0, 1, 1, 0, 1, 0, torch.device("cpu"))


class TwoNodes(DcsCluster):
    """Nodes n0 and n1 of one host."""

    def pull(self, stream: str, number: int, node: str) -> dict[str, torch.Tensor]:
        with self.puller(node).pull(stream, number) as pulled:
            return {name: t.clone() for name, t in pulled.tensors()}


@pytest.fixture
def dcs(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[TwoNodes]:
    with TwoNodes.open(etcd_servers, etcd, keys, tmp_path) as out:
        for node in ("n0", "n1"):
            out.start_node(node, chunk_bytes=CHUNK)
        yield out


# -- ranks in processes of their own -----------------------------------------------------------------------------------
def spawn_ranks(dcs: TwoNodes, rounds: int, failpoint: dict[int, str]) -> list[subprocess.Popen[str]]:
    port = free_port()
    return [ForkedProcess(
        ["publish_rank", dcs.etcd_servers.endpoints[0], dcs.keys.job,
         *map(str, (dcs.epoch, rank, port, rounds))],
        stdout=subprocess.PIPE, text=True, env={**os.environ, failpoints.ENV: failpoint.get(rank, "")})
        for rank in (0, 1)]


def outputs(ranks: list[subprocess.Popen[str]], timeout_s: float = 90) -> list[list[str]]:
    try:
        return [rank.communicate(timeout=timeout_s)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def require_whole(dcs: TwoNodes, number: int) -> None:
    """Both streams have all tensors of both ranks, on either node."""
    for node in ("n0", "n1"):
        for stream in STREAMS:
            found = dcs.pull(stream, number, node)
            extras = range(TENSORS if stream == "trainer_state" else 0)
            assert list(found) == [f"w{i}" for i in range(TENSORS)] + [f"adam.w{i}" for i in extras]
            assert all(torch.equal(found[f"w{i}"], tensor(number, i)) for i in range(TENSORS))
            assert all(torch.equal(found[f"adam.w{i}"], tensor(number, 50 + i)) for i in extras)


def test_ranks_write_to_their_own_nodes_and_streams_become_visible_together(dcs: TwoNodes) -> None:
    assert outputs(spawn_ranks(dcs, 2, {})) == 2 * [["committed 1", "committed 2"]]
    require_whole(dcs, 2)
    records = [dcs.etcd.get(dcs.keys.version(stream, 2)) for stream in STREAMS]
    assert records[0].mod_revision == records[1].mod_revision, "they were committed by two transactions"
    assert all(dcs.parts(2, stream) == [["n0"], ["n1"]] for stream in STREAMS)


@parametrize(("rank", "point"), [
    (1, "publish.sealed:2"), (0, "publish.sealed:2"), (0, "publish.replicated")],
             proved_in="chaos_tests/tests/test_dcs_failpoints.py",
             why="each further point that a rank is killed at")
def test_rank_killed_during_publish_leaves_nothing_visible_and_the_next_group_publishes(
        dcs: TwoNodes, rank: int, point: str) -> None:
    ranks = spawn_ranks(dcs, 1, {rank: point})
    lines = outputs(ranks)
    assert ranks[rank].returncode == -signal.SIGKILL, "it was not killed: this test has shown nothing"
    assert lines[rank] == [] and [line[:5] for line in lines[1 - rank]] == ["lost:"]
    assert all(VersionState.COMMITTED not in dcs.states(s).values() for s in STREAMS)
    assert outputs(spawn_ranks(dcs, 1, {})) == 2 * [["committed 1"]]
    for stream in STREAMS:
        assert [n for n, state in dcs.states(stream).items() if state is VersionState.COMMITTED] == [2]

    # The versions of the dead ranks are aborted, and nothing of others is dropped with them.
    collector = dcs.collector(1)

    def cleaned() -> bool:
        collector.sweep([])
        return all(dcs.states(s).get(1) is not VersionState.STAGING for s in STREAMS)

    wait_until(cleaned, what="the abort of the unfinished versions")
    found = dcs.pull("trainer_state", 2, "n1")
    assert torch.equal(found["w3"], tensor(1, 3)) and len(found) == 2 * TENSORS


# -- one rank ----------------------------------------------------------------------------------------------------------
class OneRank:
    """A trainer of one rank, in this process."""

    def __init__(self, dcs: TwoNodes) -> None:
        self.client = dcs.client("n0")
        self.cfg = DcsConfig(chunk_bytes=CHUNK, publish_timeout_s=3, io_timeout_s=2)
        self.publishers = {s: dcs.publisher("n0", stream=s) for s in STREAMS}
        self.dropped = threading.Event()
        self.async_publisher = AsyncPublisher(ALONE, self.cfg, dcs.etcd, dcs.keys, self.publishers, self.dropped.set,
                                              "trainer")
        dcs.stack.callback(self.async_publisher.close)
        self.arena = LocalArena(self.client)

    def submit(self, number: int) -> InFlightPublish:
        begun = InFlightPublish({s: p.begin({}) for s, p in self.publishers.items()},
                      {"policy": ("weights",), "trainer_state": ("weights", "extras")}, number)
        share = OwnedTensorWriter(self.client, self.arena, self.cfg)
        for i in range(TENSORS):
            share.add("weights", f"w{i}", tensor(number, i), i)
            share.add("extras", f"adam.w{i}", tensor(number, 50 + i), TENSORS + i)
        self.async_publisher.submit(share, begun)
        return begun


def test_hanging_node_costs_one_version_which_an_event_reports(dcs: TwoNodes) -> None:
    trainer = OneRank(dcs)
    trainer.submit(1)
    assert trainer.async_publisher.join() and not trainer.dropped.is_set()
    share_written = threading.Event()

    class Stopping(OwnedTensorWriter):
        def seal(self, deadline: float) -> dict:
            dcs.freeze("n0")
            share_written.set()
            return super().seal(deadline)

    begun = InFlightPublish({s: p.begin({}) for s, p in trainer.publishers.items()},
                  {"policy": ("weights",), "trainer_state": ("weights",)}, 2)
    share = Stopping(trainer.client, trainer.arena, trainer.cfg)
    for i in range(TENSORS):
        share.add("weights", f"w{i}", tensor(2, i), i)
    trainer.async_publisher.submit(share, begun)
    assert not trainer.async_publisher.join()
    assert share_written.is_set() and trainer.dropped.is_set()
    assert sorted(trainer.async_publisher.take_dropped()) == sorted(STREAMS)
    [event] = [e for e in events.recent(dcs.etcd, dcs.keys) if e.kind == "version.dropped"]
    assert event.data["policy"] == begun.staged["policy"].version.number == 2
    dcs.processes["n0"].send_signal(signal.SIGCONT)

    def again() -> bool:
        trainer.submit(3)
        return trainer.async_publisher.join()

    wait_until(again, what="a publish after the node continued")
    committed = [n for n, state in dcs.states("policy").items() if state is VersionState.COMMITTED]
    assert committed[0] == 1 and 2 not in committed and len(committed) == 2

    def pulled() -> dict[str, torch.Tensor] | None:
        try:
            return dcs.pull("policy", committed[-1], "n1")
        except ChunkMissing:  # n0, which has them, registers again where its lease had ended
            return None

    found = wait_until(pulled, what="a pull by the other node")
    assert torch.equal(found["w1"], tensor(3, 1))


def test_epoch_that_ends_during_a_background_publish_fences_it(dcs: TwoNodes) -> None:
    trainer = OneRank(dcs)

    class Late(OwnedTensorWriter):
        def seal(self, deadline: float) -> dict:
            fencing.raise_epoch(dcs.etcd, dcs.keys, "another")
            return super().seal(deadline)

    begun = InFlightPublish({"policy": trainer.publishers["policy"].begin({})}, {"policy": ("weights",)}, 1)
    share = Late(trainer.client, trainer.arena, trainer.cfg)
    share.add("weights", "w0", tensor(1, 0), 0)
    trainer.async_publisher.submit(share, begun)
    with pytest.raises(Fenced):
        trainer.async_publisher.join()
    assert dcs.states("policy")[1] is not VersionState.COMMITTED


def test_writer_that_dies_before_the_commit_loses_no_chunks(dcs: TwoNodes) -> None:
    """Whoever commits holds the chunks too."""
    other = dcs.client("n1")
    writer = PartWriter(LocalArena(other), chunk_bytes=CHUNK)
    writer.add("w0", tensor(1, 0), 0)
    part = writer.seal()
    leading = dcs.publisher("n0")
    stored = leading.store(leading.begin({}), [part], hold=True)
    other.close()
    collector = dcs.collector(1)
    for _ in range(3):
        collector.sweep([])
    [version] = publisher.commit([stored])
    assert version.number == 1
    leading.release_holds(stored, version)
    assert torch.equal(dcs.pull("policy", 1, "n0")["w0"], tensor(1, 0))


@full(proved_in="tests/unit/dcs/test_manifest.py", why="a version at size")
def test_version_of_a_hundred_thousand_tensors(dcs: TwoNodes) -> None:
    count = 100_000
    data = torch.arange(count * 4, dtype=torch.int32).view(count, 4)
    publishing = dcs.publisher("n0", chunk_bytes=1 << 20, staging_ttl_s=10)
    version = publishing.publish(((f"experts.{i}", row) for i, row in enumerate(data)), meta={})
    found = dcs.pull("policy", version.number, "n1")
    assert len(found) == count
    assert torch.equal(torch.stack(list(found.values())), data)


def test_local_node_and_node_by_id_are_one_connection(dcs: TwoNodes) -> None:
    """Chunks that are held for one of two connections would be let go with it."""
    client = dcs.client("n0")
    assert client.connect("n0") is client.local() is client.connect("n0")


class Clock:
    """The module ``time``, with a wall clock that is wrong."""

    jump_s = 0.0

    def time(self) -> float:
        return time.time() + self.jump_s

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


def test_jumping_clock_keeps_head_and_order(dcs: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    publishing, clock = dcs.publisher("n0"), Clock()
    for module in (writer, garbage_collector):  # not for gRPC, which reads another clock as well
        monkeypatch.setattr(module, "time", clock)
    collector = GarbageCollector(dcs.etcd, dcs.keys, RetentionPolicy(2, age_s=3600))
    dcs.stack.callback(collector.close)
    for number, jump_s in ((1, 0.0), (2, -1e7), (3, 1e7), (4, 0.0)):
        clock.jump_s = jump_s
        assert publishing.publish([("w0", tensor(number, 0))], meta={}).number == number
        for _ in range(2):
            collector.sweep([])
        assert torch.equal(dcs.pull("policy", number, "n1")["w0"], tensor(number, 0))
    versions = reads.list_versions(dcs.etcd, dcs.keys, "policy")
    assert versions[1].committed_at < versions[0].committed_at < versions[2].committed_at > versions[3].committed_at
    assert reads.head(dcs.etcd, dcs.keys, "policy") == versions[3]
    assert [v.state for v in versions[:2]] == 2 * [VersionState.GONE]


def test_sweep_releases_in_one_transaction_what_has_no_pin(dcs: TwoNodes) -> None:
    """Also what a leader of an older release has left as RELEASING."""
    publishing, collector = dcs.publisher("n0"), dcs.collector(1)
    for number in range(1, 6):
        publishing.publish([("w0", tensor(number, 0))], meta={})
    pins.pin(dcs.etcd, dcs.keys, "policy", 2, "reader", 0)
    for number in (2, 3):
        entry = reads.get_entry(dcs.etcd, dcs.keys, "policy", number)
        assert entry is not None
        dcs.etcd.put(dcs.keys.version("policy", number), entry.version.replace(state=VersionState.RELEASING).encode())
    collector.sweep([])
    entries = {e.version.number: e for e in reads.list_entries(dcs.etcd, dcs.keys, "policy")}
    assert {n: e.version.state for n, e in entries.items()} == {
        1: VersionState.GONE, 2: VersionState.RELEASING, 3: VersionState.GONE, 4: VersionState.GONE,
        5: VersionState.COMMITTED}
    assert len({entries[n].revision for n in (1, 3, 4)}) == 1
    pins.unpin(dcs.etcd, dcs.keys, "policy", 2, "reader")
    collector.sweep([])
    assert dcs.states("policy")[2] is VersionState.GONE
