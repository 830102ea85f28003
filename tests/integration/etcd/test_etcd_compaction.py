"""Compaction while a member is down: every watcher resynchronizes with the present afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from support.etcd_server import EtcdServers
from support.tcp_link import Link, Links
from support.waiting import wait_until

from elastic_rl.coordinator.api.change_projector import ObjectChange
from elastic_rl.coordinator.api.change_stream import ChangeStream, StreamLimit
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.watch_trigger import WatchTrigger
from elastic_rl.dcs.fetch.puller import HeadWatch
from elastic_rl.errors import Compacted
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import Version, VersionState

VICTIM = 0


@dataclass
class Outage:
    """Clients that know one member only, which is killed; ``near`` continues with the others."""

    servers: EtcdServers
    link: Link
    far: EtcdClient
    near: EtcdClient

    def begin(self) -> None:
        self.link.pause()
        self.servers.kill(VICTIM)
        assert self.servers.processes[VICTIM].returncode == -9

    def end(self, keys: Keys) -> None:
        """Compacts and restarts the member, whose clients reach it again only once it has the compaction."""
        self.near.compact(self.near.put(keys.root + "last", b""))
        self.servers.restart(VICTIM)
        with self.servers.connect_at(VICTIM) as back:
            wait_until(lambda: back.get(keys.root + "last"), what="the member's return")
        self.link.cut()
        self.link.resume()


@pytest.fixture
def outage(etcd3_cluster: EtcdServers) -> Iterator[Outage]:
    with ExitStack() as cleanup:
        port = int(etcd3_cluster.endpoints[VICTIM].rpartition(":")[2])
        link = cleanup.enter_context(Links()).add(port, 1e9)
        far = cleanup.enter_context(EtcdClient([f"127.0.0.1:{link.port}"], retry_budget_s=60.0))
        near = cleanup.enter_context(EtcdClient([e for i, e in enumerate(etcd3_cluster.endpoints) if i != VICTIM]))
        yield Outage(etcd3_cluster, link, far, near)


def _head(near: EtcdClient, keys: Keys, number: int) -> None:
    version = Version(stream="policy", number=number, epoch=1, state=VersionState.COMMITTED)
    near.put(keys.stream_head("policy"), version.encode())


def test_every_watcher_resynchronizes_after_a_compaction_it_missed(outage: Outage, keys: Keys) -> None:
    far, near = outage.far, outage.near
    _head(near, keys, 1)
    first = Election(near, ClusterKeys(keys.job), "first", "", 60).start()
    wait_until(lambda: first.is_leader, what="the first leader")
    woken = threading.Event()
    waker = WatchTrigger(far, keys, woken.set, lambda: True)
    second = Election(far, ClusterKeys(keys.job), "second", "", 60)
    client = Client(ChangeStream(far, keys, "far", StreamLimit(4)))
    with ExitStack() as cleanup, ThreadPoolExecutor(1) as background:
        cleanup.callback(client.stopping.set)
        waker.start()
        cleanup.callback(waker.stop)
        second.start()
        cleanup.callback(second.stop)
        wait_until(lambda: near.get(ClusterKeys(keys.job).leader("second")), what="the second candidate")
        heads = cleanup.enter_context(HeadWatch(far, keys, "policy"))
        assert getattr(heads.get(30), "number", 0) == 1
        witness = cleanup.enter_context(far.watch(keys.root, start_revision=near.range(keys.root)[1] + 1))
        stream = background.submit(asyncio.run, client.run())
        assert client.open.wait(60)
        events.emit(near, keys, event_kinds.POOL_SCALED, "before", "m")
        wait_until(lambda: client.saw("before"), what="the first event")

        outage.begin()
        _head(near, keys, 2)
        _head(near, keys, 3)
        events.emit(near, keys, event_kinds.POOL_SCALED, "meanwhile", "m")
        first.stop()
        outage.end(keys)

        with pytest.raises(Compacted):
            while True:
                witness.get(20)
        assert getattr(heads.get(20), "number", 0) == 3
        wait_until(lambda: second.is_leader, what="the second leader")
        assert client.open_again.wait(20), "the stream did not end"
        assert client.missed is None, "changes that were compacted cannot be replayed: it needs a snapshot"
        events.emit(near, keys, event_kinds.POOL_SCALED, "after", "m")
        wait_until(lambda: client.saw("after"), what="an event after the compaction")
        wait_until(lambda: _wakes(near, keys, woken), what="the waker", poll_s=0.2)
        client.stopping.set()
        stream.result(timeout=20)


@dataclass
class Client:
    """A change stream that is opened again when it ends, from the last revision seen."""

    changes: ChangeStream
    seen: list[ObjectChange] = field(default_factory=list)
    missed: list[ObjectChange] | None = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)
    open_again: threading.Event = field(default_factory=threading.Event)
    stopping: threading.Event = field(default_factory=threading.Event)

    async def run(self) -> None:
        reader = await self.changes.subscribe(frozenset({"event"}))
        self.open.set()
        while not reader.ended and not self.stopping.is_set():
            self.seen += await reader.take(0.5)
        self.changes.unsubscribe(reader)
        reader = await self.changes.subscribe(frozenset({"event"}), after=self.seen[-1].revision)
        self.missed = reader.missed
        self.open_again.set()
        while not self.stopping.is_set():
            self.seen += await reader.take(0.5)

    def saw(self, subject: str) -> bool:
        return any(c.object is not None and f'"subject":"{subject}"'.encode() in c.object for c in self.seen)


def _wakes(near: EtcdClient, keys: Keys, woken: threading.Event) -> bool:
    """Whether a change wakes the reconciler promptly. Earlier changes may still arrive, so this is polled."""
    woken.clear()
    near.put(keys.pool_spec("p"), b"")
    return woken.wait(2)
