"""Calling nodes: one that is unreachable, stopped or restarted delays or deceives nobody else, and no request is too
large."""

from __future__ import annotations

import resource
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.dcs_cluster import DcsCluster, model
from support.etcd_server import EtcdServers

from elastic_rl.dcs import protocol
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.fan_out import in_parallel, on_each
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.publish.publisher import _Replication as Replication
from elastic_rl.errors import Conflict, NodeUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode


@pytest.fixture
def dcs(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[DcsCluster]:
    with DcsCluster.open(etcd_servers, etcd, keys, tmp_path) as out:
        yield out


class SilentNode:
    """A registered node whose connections are accepted by the kernel and never answered, as those of a stopped one."""

    def __init__(self, dcs: DcsCluster, node_id: str) -> None:
        self._dcs, self.id = dcs, node_id
        self._listener = socket.create_server(("127.0.0.1", 0))
        dcs.stack.callback(self._listener.close)
        self.register()

    def register(self) -> None:
        self._dcs.etcd.put(self._dcs.keys.dcs_node(self.id), DcsNode(
            id=self.id, host="127.0.0.1", port=self._listener.getsockname()[1], pid=1, arena_path="/dev/shm/none",
            arena_bytes=1).encode())

    def register_again(self) -> None:
        self._dcs.etcd.delete(self._dcs.keys.dcs_node(self.id))
        self.register()

    def connections(self) -> int:
        """How many clients that are no nodes themselves have connected since the last call."""
        self._listener.settimeout(0.1)
        found = 0
        try:
            while True:
                with self._listener.accept()[0] as sock:
                    sock.settimeout(5)
                    found += "id" not in protocol.receive(sock)[0]
        except TimeoutError:
            return found


# -- connecting --------------------------------------------------------------------------------------------------------
def test_unreachable_node_does_not_block_calls_to_others(dcs: DcsCluster) -> None:
    dcs.start("a")
    SilentNode(dcs, "silent")
    client = dcs.client(io_timeout_s=60)
    failures: list[Exception] = []

    def connect() -> None:
        try:
            client.connect("silent")
        except NodeUnavailable as e:
            failures.append(e)

    waiting = threading.Thread(target=connect)
    waiting.start()
    try:
        for _ in range(3):
            client.connect("a").stat()
        client.local()
        assert waiting.is_alive(), "the connection that was to hang has failed already"
    finally:
        waiting.join()
    assert failures, "a silent node was connected to"


def test_unreachable_node_is_not_tried_again_at_once(dcs: DcsCluster) -> None:
    silent = SilentNode(dcs, "silent")
    client = dcs.client(io_timeout_s=0.5)
    for _ in range(3):
        with pytest.raises(NodeUnavailable, match="silent"):
            client.connect("silent")
    assert silent.connections() == 1 and client.is_unreachable("silent")
    silent.register_again()
    with pytest.raises(NodeUnavailable):
        client.connect("silent")
    assert silent.connections() == 1, "a node that registered again was not tried"


def test_publish_goes_to_reachable_replicas_first(dcs: DcsCluster) -> None:
    """After one publish that met the silent node, the next one does not wait for it."""
    dcs.start("a", "c")
    silent = SilentNode(dcs, "b")  # the successor of a
    publisher = dcs.publisher("a", replicas=2)
    first = publisher.publish(model(1).items(), meta={})
    assert silent.connections() == 1 and dcs.parts(first.number) == [["a", "c"]]
    second = publisher.publish(model(2).items(), meta={})
    assert silent.connections() == 0 and dcs.parts(second.number) == [["a", "c"]]


def test_connections_above_descriptor_1023_are_kept(dcs: DcsCluster) -> None:
    """``select.select`` refuses such descriptors: the connection, which may hold regions, was taken for a stale one."""
    dcs.start("a")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    files = [socket.socket() for _ in range(1100)]
    try:
        client = dcs.client()
        connection = client.connect("a")
        assert connection._sock is not None and connection._sock.fileno() > 1023
        assert not connection.stale() and client.connect("a") is connection
    finally:
        for file in files:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- many nodes --------------------------------------------------------------------------------------------------------
def test_stopped_nodes_delay_a_sweep_by_one_timeout_and_then_not_at_all(dcs: DcsCluster) -> None:
    """Three silent nodes; what counts is that none is waited for after another, so the test needs no clock but the
    nodes' timeout: with one after the other each sweep would meet all three."""
    dcs.start("a")
    silent = [SilentNode(dcs, n) for n in ("b", "c", "d")]
    dcs.publish(1, 2, 3)
    collector = dcs.collector(keep_versions=1, io_timeout_s=1.0)
    lines = collector.sweep([])
    assert sum(line.startswith("could not sweep node") for line in lines) == 3
    assert any(line.startswith("dropped") and line.endswith("of node a") for line in lines)
    assert [s.connections() for s in silent] == [1, 1, 1]
    dcs.publish(4)
    lines = collector.sweep([])
    assert any(line.startswith("dropped") for line in lines), "the living node was not swept"
    assert [s.connections() for s in silent] == [0, 0, 0], "a node that did not answer lately was waited for again"


def test_calls_to_many_nodes_run_at_the_same_time(dcs: DcsCluster) -> None:
    together = threading.Barrier(3)
    done, failed = in_parallel("abc", lambda item: together.wait(timeout=30) * 0 + ord(item))
    assert done == {"a": 97, "b": 98, "c": 99} and failed == {}


def test_failures_of_some_nodes_are_told_apart(dcs: DcsCluster) -> None:
    dcs.start("a")
    done, failed = on_each(dcs.client(), ["a", "gone"], lambda connection: connection.node.id)
    assert done == {"a": "a"}
    assert list(failed) == ["gone"] and isinstance(failed["gone"], NodeUnavailable)
    with pytest.raises(ZeroDivisionError):
        in_parallel([1, 0], lambda n: 1 // n)


# -- large requests ----------------------------------------------------------------------------------------------------
def test_million_digests_fit_into_bounded_requests(dcs: DcsCluster) -> None:
    """34 MB of digests, where a header has 32 MiB at most."""
    dcs.start("a", disk_bytes=64 << 20)
    version = dcs.publish(1)
    connection = dcs.client().connect("a")
    digests = [f"{i:032x}" for i in range(1_000_000)]
    assert len(connection.has([*digests, version.manifest])) == len(digests)


def test_drop_with_versions_in_several_requests_keeps_all_of_them(
        dcs: DcsCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.dcs.protocol.MAX_DIGESTS", 1)
    monkeypatch.setattr("elastic_rl.dcs.connection._RECORDS_BATCH", 1)
    dcs.start("a")
    dcs.publish(1, 2, 3, 4, 5)
    lines = dcs.collector(keep_versions=3).sweep([])
    assert any(line.startswith("dropped") for line in lines)
    for number in (3, 4, 5):
        dcs.require(model(number), number)
    _, _, held = dcs.client().connect("a").inventory()
    assert sorted(h.version.number for h in held) == [3, 4, 5]


# -- restarted replicas ------------------------------------------------------------------------------------------------
def test_replica_that_restarts_between_copy_and_commit_fails_the_commit(
        dcs: DcsCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is the process that stored the copies, and not the one that answers now, which has none of them."""
    dcs.start("a", "b")
    copy = Replication._copy

    def copy_and_restart(self: Replication, target: str, source: str, digests: list[str]) -> str:
        incarnation = copy(self, target, source, digests)
        dcs.kill("b")
        dcs.start("b")
        assert self._client.connect("b").node.incarnation != incarnation
        return incarnation

    publisher = dcs.publisher("a", replicas=2)
    with monkeypatch.context() as patched:
        patched.setattr(Replication, "_copy", copy_and_restart)
        with pytest.raises(Conflict, match="node b was lost or restarted"):
            publisher.publish(model(1).items(), meta={})
    assert reads.head(dcs.etcd, dcs.keys, "policy") is None
    version = publisher.publish(model(2).items(), meta={})
    assert dcs.parts(version.number) == [["a", "b"]]


def test_source_that_restarts_before_replication_fails_the_publish(dcs: DcsCluster) -> None:
    dcs.start("a", "b")

    class Restarting(Publisher):
        def store(self, *args, **options):  # type: ignore[no-untyped-def]
            dcs.kill("a")
            dcs.start("a")
            return super().store(*args, **options)

    with pytest.raises((Conflict, NodeUnavailable)):
        dcs.publisher("a", kind=Restarting).publish(model(1).items(), meta={})
    assert reads.head(dcs.etcd, dcs.keys, "policy") is None


def test_frozen_replica_costs_a_publish_one_timeout(dcs: DcsCluster) -> None:
    """A stopped process accepts connections and answers none: the next node is given the copy."""
    dcs.start("a", "b", "c")
    publisher = dcs.publisher("a", replicas=2)
    publisher.publish(model(1).items(), meta={})
    dcs.freeze("b")
    try:
        version = publisher.publish(model(2).items(), meta={})
        assert dcs.parts(version.number) == [["a", "c"]]
    finally:
        dcs.processes["b"].send_signal(signal.SIGCONT)
