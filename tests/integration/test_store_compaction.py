"""Compaction under watches whose member was killed: everything that watches finds its way back to the present."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import anyio
import pytest
from etcd_server import EtcdServers
from tcp_link import Link, Links

from elastic_rl.coordinator import events
from elastic_rl.coordinator.election import Election
from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.records import Version, VersionState
from elastic_rl.coordinator.store import Store
from elastic_rl.coordinator.stream import EventStreams
from elastic_rl.coordinator.waker import Waker
from elastic_rl.dcs.puller import HeadWatch
from elastic_rl.errors import Compacted
from elastic_rl.processes import wait_until

pytestmark = pytest.mark.timeout(90)
VICTIM = 0


@dataclass
class Outage:
    """Clients that know one member only, which is killed; ``near`` goes on with the others."""

    servers: EtcdServers
    link: Link
    far: Store
    near: Store

    def begin(self) -> None:
        self.link.pause()
        self.servers.kill(VICTIM)
        assert self.servers.processes[VICTIM].returncode == -9

    def end(self, keys: Keys) -> None:
        """Compacts, brings the member back, and lets nobody hear of it before it knows of the compaction."""
        self.near.compact(self.near.put(keys.root + "last", b""))
        self.servers.restart(VICTIM)
        with self.servers.connect_at(VICTIM) as back:
            wait_until(lambda: back.get(keys.root + "last"), timeout_s=10, what="the member's return")
        self.link.cut()
        self.link.resume()


@pytest.fixture
def outage(etcd3_cluster: EtcdServers) -> Iterator[Outage]:
    with ExitStack() as cleanup:
        port = int(etcd3_cluster.endpoints[VICTIM].rpartition(":")[2])
        link = cleanup.enter_context(Links()).add(port, 1e9)
        far = cleanup.enter_context(Store([f"127.0.0.1:{link.port}"], retry_budget_s=60.0))
        near = cleanup.enter_context(Store([e for i, e in enumerate(etcd3_cluster.endpoints) if i != VICTIM]))
        yield Outage(etcd3_cluster, link, far, near)


def _head(near: Store, keys: Keys, number: int) -> None:
    version = Version(stream="policy", number=number, epoch=1, state=VersionState.COMMITTED)
    near.put(keys.stream_head("policy"), version.encode())


def test_each_watcher_resynchronises_after_a_compaction_that_it_missed(outage: Outage, keys: Keys) -> None:
    far, near, stopping = outage.far, outage.near, threading.Event()
    _head(near, keys, 1)
    events.emit(near, keys, "before", "x", "m")
    first = Election(near, keys, "first", "", 60).start()
    wait_until(lambda: first.is_leader, timeout_s=10, what="the first leader")
    woken = threading.Event()
    waker, second = Waker(far, keys, woken.set), Election(far, keys, "second", "", 60)
    streams = EventStreams(far, keys, stopping)
    with ExitStack() as cleanup, ThreadPoolExecutor(1) as background:
        cleanup.callback(stopping.set)
        waker.start()
        cleanup.callback(waker.stop)
        second.start()
        cleanup.callback(second.stop)
        wait_until(lambda: near.get(keys.leader("second")), timeout_s=10, what="the second candidate")
        heads = cleanup.enter_context(HeadWatch(far, keys, "policy"))
        assert getattr(heads.get(10), "number", 0) == 1
        witness = cleanup.enter_context(far.watch(keys.root, start_revision=near.range(keys.root)[1] + 1))
        frames: list[bytes] = []
        stream = background.submit(anyio.run, _read, streams, None, frames)
        wait_until(lambda: any(b"event: before" in f for f in frames), timeout_s=10, what="the first event")

        outage.begin()
        _head(near, keys, 2)
        _head(near, keys, 3)
        events.emit(near, keys, "meanwhile", "x", "m")
        first.stop()
        outage.end(keys)

        with pytest.raises(Compacted):
            while True:
                witness.get(20)
        assert getattr(heads.get(20), "number", 0) == 3
        wait_until(lambda: second.is_leader, timeout_s=20, what="the second leader")
        stream.result(timeout=20)  # it ended; its client comes again with the last id that it has
        last = int(next(f for f in frames if b"event: before" in f).split()[1])
        again: list[bytes] = []
        background.submit(anyio.run, _read, streams, last, again)
        wait_until(lambda: any(b"event: meanwhile" in f for f in again), timeout_s=20, what="the event it missed")
        assert not any(b"event: before" in f for f in again)
        wait_until(lambda: _wakes(near, keys, woken), timeout_s=20, what="the waker", poll_s=0.2)
        stopping.set()


async def _read(streams: EventStreams, after: int | None, frames: list[bytes]) -> None:
    async for frame in await streams.follow(after, 10):
        frames.append(frame)


def _wakes(near: Store, keys: Keys, woken: threading.Event) -> bool:
    """Whether a change wakes the reconciler at once. What came before may still be on its way, so we ask twice."""
    woken.clear()
    near.put(keys.pool_spec("p"), b"")
    return woken.wait(2)
