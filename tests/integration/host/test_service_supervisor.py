"""The supervisor of a local cluster's services: real processes are killed, and come back on their data and ports."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from support.tiers import full
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.security import TOKEN_FILE, Security
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.host import cluster_lock, etcd_server
from elastic_rl.host.local_cluster import OWNER_ENV, Cluster
from elastic_rl.host.processes import marked
from elastic_rl.host.restart_policy import RestartLimits
from elastic_rl.host.service_supervisor import ServiceSupervisor
from elastic_rl.net import http_client

TENSOR = torch.arange(1000.0)
QUICK = RestartLimits(backoff_initial_s=0.2, backoff_max_s=1.0, budget=100)


class Supervised:
    """A cluster, a version in it, and its supervisor."""

    def __init__(self, folder: Path) -> None:
        cfg = config.parse({"job": f"t-{secrets.token_hex(4)}", "run_dir": str(folder),
                            "dcs": {"arena_bytes": 32 << 20}, "coordinator": {"replicas": 1}})
        self.cluster = Cluster(cfg)
        self.info: ClusterInfo = self.cluster.up()
        self.keys = Keys(self.info.job)
        self.etcd = EtcdClient(self.info.etcd_endpoints, call_timeout_s=2.0)
        self.supervisor = ServiceSupervisor(self.cluster, self.info, limits=QUICK)

    @property
    def security(self) -> Security:
        return Security.from_config(self.cluster.cfg.dcs, self.cluster.dir / TOKEN_FILE)

    def publish(self) -> None:
        epoch = fencing.raise_epoch(self.etcd, self.keys, "test").number
        with Publisher(self.etcd, self.keys, "policy", epoch=epoch, owner="test", chunk_bytes=4096, staging_ttl_s=5,
                       security=self.security) as publisher:
            publisher.publish([("w", TENSOR)], meta={})
        disk = self.cluster.dir / "disk"
        wait_until(lambda: len([p for p in disk.rglob("??/*") if not p.suffix]) == 2,
                   what="the chunk and the manifest on disk")

    def pull(self) -> torch.Tensor:
        with (Puller(self.etcd, self.keys, "test", io_timeout_s=10, security=self.security) as puller,
              puller.pull("policy") as pulled):
            return dict(pulled.tensors())["w"].clone()

    def pid(self, name: str) -> int:
        """Of the process that runs; 0 where none does."""
        return next((r.pid for r in self.cluster.book.alive() if r.name == name), 0)

    def url(self, name: str) -> str:
        return next(r.url for r in self.cluster.book.all() if r.name == name)

    def kill(self, name: str) -> int:
        pid = self.pid(name)
        psutil.Process(pid).kill()
        return pid

    def await_new(self, name: str, old: int) -> int:
        return wait_until(lambda: self.pid(name) not in (0, old) and self.pid(name),
                          what=f"another process of {name}")

    def services(self) -> list[int]:
        """Processes of the cluster that are no descendants of others of it."""
        pids = {p.pid for p in marked(str(self.cluster.dir), OWNER_ENV)}
        return [p for p in pids if not {q.pid for q in psutil.Process(p).parents()} & pids]

    def has_event(self, kind: str, subject: str) -> bool:
        return any((e.kind, e.subject) == (kind, subject) for e in events.recent(self.etcd, self.keys, 500))


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    out = Supervised(tmp_path)
    try:
        yield out
    finally:
        out.etcd.close()
        out.cluster.down()


def answers(url: str) -> bool:
    try:
        return http_client.request("GET", f"{url}/healthz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def settle(supervisor: ServiceSupervisor, until: Callable[[], object], what: str) -> None:
    """Passes of a supervisor whose thread does not run, until something holds."""
    def tick() -> object:
        supervisor.tick()
        return until()

    wait_until(tick, what=what, poll_s=0.1)


def test_killed_services_come_back_on_their_data_and_ports(supervised: Supervised) -> None:
    supervised.publish()
    supervised.etcd.put(f"{supervised.keys.root}mine", b"kept")
    urls = {name: supervised.url(name) for name in ("etcd-0", "coordinator-0", "dcs-node-0")}
    with supervised.supervisor:
        for name, kind, subject in (("etcd-0", "etcd.restarted", "etcd-0"),
                                    ("dcs-node-0", "dcs.restarted", "node-0"),
                                    ("coordinator-0", "coordinator.restarted", "coordinator-0")):
            supervised.await_new(name, supervised.kill(name))
            endpoint = supervised.info.etcd_endpoints[0]
            wait_until(lambda endpoint=endpoint: etcd_server.healthy(endpoint), what="etcd")
            wait_until(lambda kind=kind, subject=subject: supervised.has_event(kind, subject),
                       what=f"the event {kind}")
        wait_until(lambda: answers(urls["coordinator-0"]), what="the coordinator at its old address")
    assert {name: supervised.url(name) for name in urls} == urls
    assert supervised.etcd.get(f"{supervised.keys.root}mine").value == b"kept"
    node = f'"pid":{supervised.pid("dcs-node-0")}'.encode()
    wait_until(lambda: (kv := supervised.etcd.get(supervised.keys.dcs_node("node-0"))) and node in kv.value,
               what="the registration of the new node")
    assert torch.equal(supervised.pull(), TENSOR)
    assert len(supervised.services()) == 3


@full(proved_in="tests/unit/host/test_revive.py tests/integration/host/test_service_supervisor.py",
      why="real services that all end at once")
def test_everything_killed_at_once_comes_back_in_order(supervised: Supervised) -> None:
    old = {name: supervised.kill(name) for name in ("etcd-0", "coordinator-0", "dcs-node-0")}
    with supervised.supervisor:
        for name, pid in old.items():
            supervised.await_new(name, pid)
        wait_until(lambda: supervised.supervisor.waiting() == {}, what="all services")
    assert etcd_server.healthy(supervised.info.etcd_endpoints[0], timeout_s=60)


@full(proved_in="tests/unit/host/test_revive.py tests/unit/host/test_restart_policy.py",
      why="a real command beside the supervisor")
def test_service_that_another_command_starts_is_adopted_and_never_started_twice(supervised: Supervised) -> None:
    supervisor = supervised.supervisor
    supervisor.tick()
    old = supervised.kill("dcs-node-0")
    wait_until(lambda: not supervised.pid("dcs-node-0"), what="the kill")
    with cluster_lock.held(supervised.cluster.dir, timeout_s=0.0):  # as another `up` does
        for _ in range(5):
            supervisor.tick()
        assert not supervised.pid("dcs-node-0"), "it was started beside a command that holds the lock"
    supervised.cluster.up()
    new = supervised.pid("dcs-node-0")
    assert new not in (0, old)
    for _ in range(5):
        supervisor.tick()
    assert supervised.pid("dcs-node-0") == new and len(supervised.services()) == 3
    assert not supervised.has_event("dcs.restarted", "node-0"), "another command started it"


@full(proved_in="tests/unit/host/test_revive.py", why="real services that are taken down")
def test_cluster_that_was_taken_down_stays_down(supervised: Supervised) -> None:
    with supervised.supervisor:
        wait_until(lambda: supervised.supervisor._states, what="the first pass")
        supervised.cluster.down()
        time.sleep(2.0)  # several passes: what must not happen would have happened
        assert not supervised.services() and supervised.supervisor.waiting() == {}


@full(proved_in="tests/unit/host/test_revive.py", why="a real etcd")
def test_etcd_whose_data_are_gone_is_not_started_on_an_empty_folder(supervised: Supervised) -> None:
    supervisor = supervised.supervisor
    supervisor.tick()
    supervised.kill("etcd-0")
    wait_until(lambda: not supervised.pid("etcd-0"), what="the kill")
    data = supervised.cluster.dir / "etcd"
    data.rename(data.with_name("elsewhere"))
    settle(supervisor, lambda: any("are gone" in line for line in supervisor.waiting().values()), "the reason")
    assert not supervised.pid("etcd-0") and not data.exists()
    data.with_name("elsewhere").rename(data)
    settle(supervisor, lambda: supervised.pid("etcd-0"), "the restart on the data")


@full(proved_in="tests/unit/host/test_revive.py", why="real services")
def test_service_of_another_boot_is_not_supervised(supervised: Supervised) -> None:
    """Its process may run on another host that shares this folder."""
    record = supervised.cluster.book.folder / "dcs-node-0.json"
    record.write_text(record.read_text().replace('"boot": "', '"boot": "x'))
    for _ in range(3):
        supervised.supervisor.tick()
    assert len(supervised.services()) == 3 and supervised.supervisor.waiting() == {}
    supervised.cluster.book.add("dcs-node-0", next(p for p in supervised.services() if "dcs.node" in " ".join(
        psutil.Process(p).cmdline())), supervised.url("dcs-node-0"))
