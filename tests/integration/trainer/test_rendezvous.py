"""The etcd v3 rendezvous backend and the store that agents share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from support.etcd_server import EtcdServers
from support.waiting import wait_until
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousHandler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.net.addresses import free_port
from elastic_rl.trainer.group.rendezvous import BACKEND, Etcd3Backend, Etcd3Store


@pytest.fixture
def backend(etcd: EtcdClient, keys: Keys) -> Etcd3Backend:
    return Etcd3Backend(etcd, keys.rendezvous_prefix() + "state")


@pytest.fixture
def shared(etcd: EtcdClient, keys: Keys) -> Etcd3Store:
    return Etcd3Store(etcd, keys.rendezvous_prefix() + "store/", timeout_s=5)


def test_state_is_written_only_with_the_current_token(backend: Etcd3Backend) -> None:
    assert backend.get_state() is None
    first = backend.set_state(b"a")
    assert first is not None and first[0] == b"a" and first[2]
    assert backend.set_state(b"b") == (b"a", first[1], False), "no token, but there is a state"
    second = backend.set_state(b"c", first[1])
    assert second is not None and second[2]
    assert backend.set_state(b"d", first[1]) == (b"c", second[1], False), "an old token"
    assert backend.get_state() == (b"c", second[1])


def test_deleted_state_is_not_written_with_its_old_token(backend: Etcd3Backend, etcd: EtcdClient, keys: Keys) -> None:
    first = backend.set_state(b"a")
    assert first is not None
    etcd.delete(keys.rendezvous_prefix() + "state")
    assert backend.set_state(b"b", first[1]) is None


def test_store_counts_over_threads_and_bounds_waits(shared: Etcd3Store) -> None:
    threads = [threading.Thread(target=lambda: [shared.add("n", 1) for _ in range(5)]) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=20)
    assert shared.add("n", 0) == 20
    with pytest.raises(LookupError, match="absent"):
        shared.wait(["n", "absent"], timedelta(milliseconds=100))
    shared.set("absent", "here")
    assert shared.get("absent") == b"here"
    assert shared.compare_set("absent", "other", "new") == b"here"
    assert shared.compare_set("absent", "here", "new") == b"new"
    assert shared.delete_key("absent") and not shared.check(["absent"])


def handler(etcd: EtcdClient, keys: Keys, nodes: int) -> RendezvousHandler:
    return get_rendezvous_handler(RendezvousParameters(
        backend=BACKEND, endpoint=",".join(etcd.endpoints), run_id="r", min_nodes=nodes, max_nodes=nodes,
        local_addr="127.0.0.1", prefix=keys.rendezvous_prefix(), call_timeout_s=2, join_timeout=30,
        last_call_timeout=1))


@pytest.fixture
def two_agents(etcd: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RendezvousHandler]]:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    handlers = [handler(etcd, keys, 2) for _ in range(2)]
    yield handlers
    for h in handlers:
        h.shutdown()


def test_two_agents_rendezvous_through_the_entry_point(two_agents: list[RendezvousHandler]) -> None:
    found: list[tuple[int, int]] = []

    def join(agent: RendezvousHandler) -> None:
        info = agent.next_rendezvous()
        found.append((info.rank, info.world_size))

    threads = [threading.Thread(target=join, args=(agent,)) for agent in two_agents]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=30)
    assert sorted(found) == [(0, 2), (1, 2)]


def test_unreachable_etcd_is_a_rendezvous_connection_error() -> None:
    with EtcdClient([f"127.0.0.1:{free_port()}"], call_timeout_s=0.2, retry_budget_s=0.5) as away, \
            pytest.raises(RendezvousConnectionError):
        Etcd3Backend(away, "/k").get_state()


def test_agent_that_has_joined_reads_what_it_knows_while_etcd_is_away(etcd_servers: EtcdServers, keys: Keys) -> None:
    """Torch elastic reads the state again and again while the ranks work, and ends its agent when that fails."""
    with EtcdClient(etcd_servers.endpoints, call_timeout_s=2.0, retry_budget_s=4.0) as etcd:
        backend = Etcd3Backend(etcd, keys.rendezvous_prefix() + "state")
        assert backend.get_state() is None
        written = backend.set_state(b"joined")
        assert written is not None and backend.get_state() == (b"joined", written[1])
        etcd_servers.stop(0)
        try:
            assert backend.get_state() == (b"joined", written[1])
            assert backend.set_state(b"changed", written[1]) == (b"joined", written[1], False)
        finally:
            etcd_servers.cont(0)


def test_agent_whose_heartbeat_etcd_did_not_take_goes_on(etcd_servers: EtcdServers, keys: Keys,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own holder of the state writes what it could not write with the next read."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    handler = get_rendezvous_handler(RendezvousParameters(
        backend=BACKEND, endpoint=etcd_servers.endpoints[0], run_id="r", min_nodes=1, max_nodes=1,
        local_addr="127.0.0.1", prefix=keys.rendezvous_prefix(), last_call_timeout=1, keep_alive_interval=1,
        keep_alive_max_attempt=10_000, call_timeout_s=0.3, retry_budget_s=0.5))
    handler.next_rendezvous()
    etcd_servers.stop(0)
    try:
        handler._state_holder.mark_dirty()
        assert [handler.num_nodes_waiting() for _ in range(4) if not time.sleep(1.1)] == [0] * 4
    finally:
        etcd_servers.cont(0)
    wait_until(handler.shutdown, what="the write that closes the rendezvous", poll_s=0.5)
