"""Publishing by several ranks to several nodes, behind the training's back: all of a version, or nothing of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch
from publish_rank import STREAMS, TENSORS, tensor
from support.dcs_nodes import Nodes
from support.etcd_server import EtcdServers

from elastic_rl.config import DcsConfig
from elastic_rl.dcs import catalog, failpoints
from elastic_rl.dcs.catalog import garbage_collector as janitors
from elastic_rl.dcs.catalog.garbage_collector import GarbageCollector
from elastic_rl.dcs.catalog.retention import RetentionPolicy
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.publish import publisher
from elastic_rl.dcs.publish.part_writer import LocalArena, PartWriter
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.errors import Fenced
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import VersionState
from elastic_rl.runtime import free_port, wait_until
from elastic_rl.trainer.async_publish import AsyncPublisher, InFlightPublish
from elastic_rl.trainer.owned_tensors import OwnedTensorWriter
from elastic_rl.trainer.parallel import ParallelDims

CHUNK = 64 << 10
ALONE = ParallelDims(0, 1, 1, 0, 1, 0, torch.device("cpu"))


@dataclass(kw_only=True)
class Hub(Nodes):
    """Two nodes of one host, and what was opened to them."""

    epoch: int
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def publisher(self, stream: str, node: str = "n0") -> Publisher:
        return self.stack.enter_context(Publisher(
            self.etcd, self.keys, stream, epoch=self.epoch, owner="test", chunk_bytes=CHUNK, staging_ttl_s=3,
            io_timeout_s=5, node=node))

    def hub(self, node: str) -> DcsClient:
        out = DcsClient(self.etcd, self.keys, io_timeout_s=5, node=node)
        self.stack.callback(out.close)
        return out

    def pull(self, stream: str, number: int, node: str) -> dict[str, torch.Tensor]:
        with Puller(self.etcd, self.keys, "test", pin_ttl_s=5, io_timeout_s=10, node=node) as puller, \
                puller.pull(stream, number) as pulled:
            return {name: t.clone() for name, t in pulled.tensors()}

    def states(self, stream: str) -> dict[int, VersionState]:
        return {v.number: v.state for v in catalog.list_versions(self.etcd, self.keys, stream)}

    def close(self) -> None:
        self.stack.close()
        super().close()


@pytest.fixture
def hub(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[Hub]:
    out = Hub(etcd_servers=etcd_servers, etcd=etcd, keys=keys, folder=tmp_path,
              epoch=fencing.raise_epoch(etcd, keys, "test").number)
    try:
        for node in ("n0", "n1"):
            out.start_node(node, chunk_bytes=CHUNK)
        yield out
    finally:
        out.close()


# -- ranks in processes of their own ---------------------------------------------------------------------------------
def spawn_ranks(hub: Hub, rounds: int, failpoint: dict[int, str]) -> list[subprocess.Popen[str]]:
    port = free_port()
    path = Path(__file__).with_name("publish_rank.py")
    return [subprocess.Popen(
        [sys.executable, path, hub.etcd_servers.endpoints[0], hub.keys.job, str(hub.epoch), str(rank), str(port),
         str(rounds)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, failpoints.ENV: failpoint.get(rank, "")})
        for rank in (0, 1)]


def said(ranks: list[subprocess.Popen[str]], timeout_s: float = 90) -> list[list[str]]:
    try:
        return [rank.communicate(timeout=timeout_s)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def assert_whole(hub: Hub, number: int) -> None:
    """Both streams have all tensors of both ranks, on a node that one of the two did not write to."""
    for node in ("n0", "n1"):
        for stream in STREAMS:
            found = hub.pull(stream, number, node)
            extras = range(TENSORS if stream == "trainer_state" else 0)
            assert list(found) == [f"w{i}" for i in range(TENSORS)] + [f"adam.w{i}" for i in extras]
            assert all(torch.equal(found[f"w{i}"], tensor(number, i)) for i in range(TENSORS))
            assert all(torch.equal(found[f"adam.w{i}"], tensor(number, 50 + i)) for i in extras)


@pytest.mark.timeout(180)
def test_two_ranks_write_to_two_nodes_and_both_streams_become_visible_together(hub: Hub) -> None:
    assert said(spawn_ranks(hub, 2, {})) == 2 * [["committed 1", "committed 2"]]
    assert_whole(hub, 2)
    versions = [catalog.get_version(hub.etcd, hub.keys, stream, 2) for stream in STREAMS]
    records = [hub.etcd.get(hub.keys.version(stream, 2)) for stream in STREAMS]
    assert records[0].mod_revision == records[1].mod_revision, "they were committed by two transactions"
    assert all(v is not None and set(v.nodes) >= {"n0", "n1"} for v in versions)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("rank", "point"), [
    (1, "publish.sealed:2"), (0, "publish.sealed:2"), (0, "publish.replicated")])
def test_a_rank_killed_in_mid_publish_leaves_nothing_visible_and_the_next_group_goes_on(
        hub: Hub, rank: int, point: str) -> None:
    ranks = spawn_ranks(hub, 1, {rank: point})
    lines = said(ranks)
    assert ranks[rank].returncode == -signal.SIGKILL, "it was not killed: this test has shown nothing"
    assert lines[rank] == [] and [line[:5] for line in lines[1 - rank]] == ["lost:"]
    assert all(VersionState.COMMITTED not in hub.states(s).values() for s in STREAMS)
    assert said(spawn_ranks(hub, 1, {})) == 2 * [["committed 1"]]
    for stream in STREAMS:
        assert [n for n, state in hub.states(stream).items() if state is VersionState.COMMITTED] == [2]

    # What the dead ones began is ended by the janitor, and takes nothing with it.
    janitor = GarbageCollector(hub.etcd, hub.keys, RetentionPolicy(1))
    hub.stack.callback(janitor.close)

    def cleaned() -> bool:
        janitor.sweep([])
        return all(hub.states(s).get(1) is not VersionState.STAGING for s in STREAMS)

    wait_until(cleaned, timeout_s=30, what="the end of the unfinished versions")
    found = hub.pull("trainer_state", 2, "n1")
    assert torch.equal(found["w3"], tensor(1, 3)) and len(found) == 2 * TENSORS


# -- one rank, and what happens behind it ----------------------------------------------------------------------------
class Alone:
    """A trainer of one rank, here."""

    def __init__(self, hub: Hub, **dcs: object) -> None:
        self.hub, self.client = hub, hub.hub("n0")
        self.cfg = DcsConfig(chunk_bytes=CHUNK, **{"publish_timeout_s": 3, "io_timeout_s": 2, **dcs})
        self.publishers = {s: hub.publisher(s) for s in STREAMS}
        self.dropped = threading.Event()
        self.behind = AsyncPublisher(ALONE, self.cfg, hub.etcd, hub.keys, self.publishers, self.dropped.set)
        hub.stack.callback(self.behind.close)
        self.arena = LocalArena(self.client)

    def submit(self, number: int) -> InFlightPublish:
        begun = InFlightPublish({s: p.begin({}) for s, p in self.publishers.items()},
                      {"policy": ("weights",), "trainer_state": ("weights", "extras")}, number)
        share = OwnedTensorWriter(self.client, self.arena, self.cfg)
        for i in range(TENSORS):
            share.add("weights", f"w{i}", tensor(number, i), i)
            share.add("extras", f"adam.w{i}", tensor(number, 50 + i), TENSORS + i)
        self.behind.submit(share, begun)
        return begun


@pytest.mark.timeout(120)
def test_a_node_that_hangs_costs_one_version_on_the_record_and_the_next_one_goes_on(hub: Hub) -> None:
    trainer = Alone(hub)
    trainer.submit(1)
    assert trainer.behind.join() and not trainer.dropped.is_set()
    node = hub.processes["n0"].pid
    share_written = threading.Event()

    class Stopping(OwnedTensorWriter):
        def seal(self, deadline: float) -> dict:
            os.kill(node, signal.SIGSTOP)
            wait_until(lambda: psutil.Process(node).status() == psutil.STATUS_STOPPED, timeout_s=5, what="the stop")
            share_written.set()
            return super().seal(deadline)

    begun = InFlightPublish({s: p.begin({}) for s, p in trainer.publishers.items()},
                  {"policy": ("weights",), "trainer_state": ("weights",)}, 2)
    share = Stopping(trainer.client, trainer.arena, trainer.cfg)
    for i in range(TENSORS):
        share.add("weights", f"w{i}", tensor(2, i), i)
    trainer.behind.submit(share, begun)
    assert not trainer.behind.join()
    assert share_written.is_set() and trainer.dropped.is_set()
    assert sorted(trainer.behind.take_dropped()) == sorted(STREAMS)
    [told] = [e for e in events.recent(hub.etcd, hub.keys) if e.kind == "version.dropped"]
    assert told.data["policy"] == begun.staged["policy"].version.number == 2
    os.kill(node, signal.SIGCONT)

    def again() -> bool:
        trainer.submit(3)
        return trainer.behind.join()

    wait_until(again, timeout_s=30, what="a publish after the node went on")
    committed = [n for n, state in hub.states("policy").items() if state is VersionState.COMMITTED]
    assert committed[0] == 1 and 2 not in committed and len(committed) == 2
    assert torch.equal(hub.pull("policy", committed[-1], "n1")["w1"], tensor(3, 1))


def test_an_epoch_that_ends_behind_the_training_fences_it(hub: Hub) -> None:
    trainer = Alone(hub)

    class Late(OwnedTensorWriter):
        def seal(self, deadline: float) -> dict:
            fencing.raise_epoch(hub.etcd, hub.keys, "another")
            return super().seal(deadline)

    begun = InFlightPublish({"policy": trainer.publishers["policy"].begin({})}, {"policy": ("weights",)}, 1)
    share = Late(trainer.client, trainer.arena, trainer.cfg)
    share.add("weights", "w0", tensor(1, 0), 0)
    trainer.behind.submit(share, begun)
    with pytest.raises(Fenced):
        trainer.behind.join()
    assert hub.states("policy")[1] is not VersionState.COMMITTED


def test_a_writer_that_goes_after_it_told_its_part_is_not_missed(hub: Hub) -> None:
    """Whoever commits holds the chunks too, so those of a rank that died before the commit are not dropped."""
    other = hub.hub("n1")
    writer = PartWriter(LocalArena(other), chunk_bytes=CHUNK)
    writer.add("w0", tensor(1, 0), 0)
    part = writer.seal()
    leading = hub.publisher("policy")
    stored = leading.store(leading.begin({}), [part], hold=True)
    other.close()
    janitor = GarbageCollector(hub.etcd, hub.keys, RetentionPolicy(1))
    hub.stack.callback(janitor.close)
    for _ in range(3):
        janitor.sweep([])
    assert publisher.commit([stored])[0].number == 1
    leading.settle(stored)
    assert torch.equal(hub.pull("policy", 1, "n0")["w0"], tensor(1, 0))


@pytest.mark.timeout(180)
def test_a_version_of_a_hundred_thousand_tensors(hub: Hub) -> None:
    count = 100_000
    data = torch.arange(count * 4, dtype=torch.int32).view(count, 4)
    publishing = hub.stack.enter_context(Publisher(
        hub.etcd, hub.keys, "policy", epoch=hub.epoch, owner="test", chunk_bytes=1 << 20, staging_ttl_s=10, node="n0"))
    version = publishing.publish(((f"experts.{i}", row) for i, row in enumerate(data)), meta={})
    found = hub.pull("policy", version.number, "n1")
    assert len(found) == count
    assert torch.equal(torch.stack(list(found.values())), data)


def test_a_node_asked_for_by_id_and_as_the_local_one_is_one_connection(hub: Hub) -> None:
    """What is held for a connection would be let go with it."""
    client = hub.hub("n0")
    assert client.connect("n0") is client.local() is client.connect("n0")


class Clock:
    """The module ``time``, with a wall clock that is wrong."""

    jump_s = 0.0

    def time(self) -> float:
        return time.time() + self.jump_s

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


def test_a_clock_that_jumps_takes_neither_the_head_nor_the_order(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    publishing, clock = hub.publisher("policy"), Clock()
    for module in (catalog, janitors):  # not for gRPC, which asks another clock as well and would see two times
        monkeypatch.setattr(module, "time", clock)
    janitor = GarbageCollector(hub.etcd, hub.keys, RetentionPolicy(2, age_s=3600))
    hub.stack.callback(janitor.close)
    for number, jump_s in ((1, 0.0), (2, -1e7), (3, 1e7), (4, 0.0)):
        clock.jump_s = jump_s
        assert publishing.publish([("w0", tensor(number, 0))], meta={}).number == number
        for _ in range(2):
            janitor.sweep([])
        assert torch.equal(hub.pull("policy", number, "n1")["w0"], tensor(number, 0))
    versions = catalog.list_versions(hub.etcd, hub.keys, "policy")
    assert versions[1].committed_at < versions[0].committed_at < versions[2].committed_at > versions[3].committed_at
    assert catalog.head(hub.etcd, hub.keys, "policy") == versions[3]
    assert [v.state for v in versions[:2]] == 2 * [VersionState.GONE]
