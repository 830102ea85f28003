"""The host agent: real services are killed, and come back on their data and ports, with no other command running."""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from support.tiers import full, parametrize
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.security import Security
from elastic_rl.errors import ConfigError
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership
from elastic_rl.host import kept_state, processes
from elastic_rl.host.agent.status import AgentStatus, AgentWatch
from elastic_rl.host.here import heartbeats_here
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.processes import OWNER_ENV
from elastic_rl.net import http_client

TENSOR = torch.arange(1000.0)


class Up:
    """A cluster that is up, and what its host agent keeps running."""

    def __init__(self, folder: Path) -> None:
        cfg = config.parse({"job": f"t-{secrets.token_hex(4)}", "run_dir": str(folder),
                            "dcs": {"arena_bytes": 32 << 20}, "coordinator": {"replicas": 1}})
        self.cluster = Cluster(cfg)
        self.info: ClusterInfo = self.cluster.up()
        self.keys = Keys(self.info.job)
        self.etcd = EtcdClient(self.info.etcd_endpoints, call_timeout_s=2.0)

    @property
    def security(self) -> Security:
        return dcs_security(self.cluster.cfg)

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
        """The pid of the process that runs; 0 where none does."""
        return self.pids().get(name, 0)

    def pids(self) -> dict[str, int]:
        return {r.name: r.pid for r in self.cluster.services.running()}

    def urls(self) -> dict[str, str]:
        return {r.name: r.url for r in self.cluster.services.all()}

    def active_agent(self) -> int:
        """Pid of the active process of the agent, once it has a standby."""
        def found() -> int:
            status = AgentStatus.load(self.cluster.paths.agent_status)
            agents = [r.pid for r in self.cluster.agents.running()]
            return status.pid if status is not None and len(agents) == 2 and status.pid in agents else 0
        return wait_until(found, what="an active agent with its standby")

    def kill(self, name: str) -> int:
        pid = self.pid(name)
        psutil.Process(pid).kill()
        return pid

    def await_new(self, name: str, old: int) -> int:
        return wait_until(lambda: self.pid(name) not in (0, old) and self.pid(name),
                          what=f"another process of {name}")

    def has_event(self, kind: str, subject: str) -> bool:
        return any((e.kind, e.subject) == (kind, subject) for e in events.recent(self.etcd, self.keys, 500))


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    out = Up(tmp_path)
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


def kill(pid: int) -> None:
    psutil.Process(pid).kill()


def test_killed_services_come_back_on_their_data_and_ports(up: Up) -> None:
    up.publish()
    up.etcd.put(f"{up.keys.root}mine", b"kept")
    urls, first = up.urls(), up.pids()
    for name, kind, subject in (("etcd-0", "etcd.restarted", "etcd-0"), (up.cluster.node, "dcs.restarted", "node-0"),
                                ("coordinator-0", "coordinator.restarted", "coordinator-0")):
        kill(first[name])
        up.await_new(name, first[name])
        wait_until(lambda kind=kind, subject=subject: up.has_event(kind, subject), what=f"the event {kind}")
    wait_until(lambda: answers(urls["coordinator-0"]), what="the coordinator at its old address")
    assert up.urls() == urls
    assert up.etcd.get(f"{up.keys.root}mine").value == b"kept"
    node = f'"pid":{up.pid(up.cluster.node)}'.encode()
    wait_until(lambda: (kv := up.etcd.get(up.keys.dcs_node("node-0"))) and node in kv.value,
               what="the registration of the new node")
    assert torch.equal(up.pull(), TENSOR)


@parametrize("kills", [3, 20], proved_in="tests/integration/host/test_host_agent.py", why="more random moments")
def test_services_keep_their_pids_when_their_agent_is_killed_at_random_moments(up: Up, kills: int) -> None:
    before, agents, moments = up.pids(), set(), random.Random(3)
    for _ in range(kills):
        agents.add(active := up.active_agent())
        time.sleep(moments.random())  # a random moment of the next agent's start
        kill(active)
        wait_until(lambda active=active: active not in [r.pid for r in up.cluster.agents.running()], what="the kill")
    assert up.active_agent() not in agents and len(agents) == kills
    assert up.pids() == before
    kill(before["etcd-0"])
    up.await_new("etcd-0", before["etcd-0"])


def test_stopped_agent_is_replaced_by_its_standby(up: Up) -> None:
    """It holds its lock, and would start nothing again."""
    heartbeats = heartbeats_here(up.cluster.cfg)
    with Membership(up.etcd, up.keys, "engine", "e", ttl_s=3, heartbeats=heartbeats).start() as member:
        record = up.keys.heartbeats(heartbeats.host)
        before = wait_until(lambda: up.etcd.get(record) if heartbeats.is_collected(member.incarnation) else None,
                            what="heartbeats that the agent collects")
        stopped = up.active_agent()
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: not psutil.pid_exists(stopped) or psutil.Process(stopped).status() == psutil.STATUS_ZOMBIE,
                   what="the end of the stopped agent")
        assert up.active_agent() != stopped
        wait_until(lambda: heartbeats.is_collected(member.incarnation) and (
            found := up.etcd.get(record)) and found.lease != before.lease,
            what="heartbeats that the other one collects")


@full(proved_in="tests/unit/host/test_revive.py tests/integration/host/test_host_agent.py",
      why="real services that all end at once")
def test_everything_killed_at_once_comes_back_in_order(up: Up) -> None:
    first = up.pids()
    up.active_agent()
    for pid in [*first.values(), *(r.pid for r in up.cluster.agents.running())]:
        kill(pid)
    assert up.cluster.up() == up.info
    assert not set(up.pids().values()) & set(first.values()) and up.active_agent()


@full(proved_in="tests/unit/host/test_revive.py", why="a real etcd")
def test_etcd_whose_data_are_gone_is_not_started_on_an_empty_folder(up: Up) -> None:
    data = up.cluster.dir / "etcd"
    data.rename(data.with_name("elsewhere"))
    kill(old := up.pid("etcd-0"))
    watch = AgentWatch(up.cluster)
    wait_until(lambda: any("are gone" in line for line in watch.waiting().values()), what="the reason")
    assert not up.pid("etcd-0") and not data.exists()
    data.with_name("elsewhere").rename(data)
    up.await_new("etcd-0", old)


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(config.parse({"job": "owned", "run_dir": str(tmp_path)}))
    yield cluster
    cluster.down()


def start_owner(cluster: Cluster, said: str) -> subprocess.Popen[bytes]:
    """Starts a process that owns the cluster and starts it; returns when it has said something."""
    program = f"""
import time
from elastic_rl import config
from elastic_rl.host.local_cluster import Cluster
cluster = Cluster(config.parse({{
    "job": "owned", "run_dir": {str(cluster.cfg.run_dir)!r}, "coordinator": {{"replicas": 1}},
    "dcs": {{"arena_bytes": 1 << 25}}}}), say=lambda line: print(line, flush=True))
with cluster.owned():
    cluster.up()
    print("up", flush=True)
    time.sleep(3600)
"""
    log = cluster.cfg.run_dir / "log"
    owner = processes.spawn([sys.executable, "-c", program], log=log)
    wait_until(lambda: said in log.read_text().splitlines(), what=said, alive=lambda: owner.poll() is None)
    return owner


def assert_goes_down(cluster: Cluster) -> None:
    wait_until(lambda: not processes.marked(str(cluster.dir), OWNER_ENV), what="the end of everything")
    assert not cluster.segments() and not cluster.up_before and not cluster.paths.owner_lock.exists()


def test_cluster_goes_down_with_its_owner_and_keeps_its_state(owned: Cluster) -> None:
    owner = start_owner(owned, "up")
    with pytest.raises(ConfigError, match="already being trained"), owned.owned():
        pass
    os.kill(owner.pid, signal.SIGKILL)
    assert_goes_down(owned)
    assert kept_state.can_continue(owned.cfg)


@parametrize("said", ["starting coordinator-0", "starting etcd-0", "starting dcs-owned"],
             proved_in="tests/integration/host/test_host_agent.py", why="further moments of a start")
def test_owner_killed_while_it_starts_the_cluster_leaves_nothing_running(owned: Cluster, said: str) -> None:
    os.kill(start_owner(owned, said).pid, signal.SIGKILL)
    assert_goes_down(owned)


def test_agent_ends_what_a_killed_command_was_stopping(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    up.active_agent()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(up.cluster, "_stop", killed)
        up.cluster.down()
    assert_goes_down(up.cluster)


def test_settings_that_cannot_be_read_stop_no_supervision(up: Up) -> None:
    up.active_agent()
    up.cluster.paths.settings.write_text("no: setting\n")
    watch, old = AgentWatch(up.cluster), up.pid("coordinator-0")
    wait_until(lambda: "host agent" in watch.waiting(), what="the fault")
    kill(old)
    up.await_new("coordinator-0", old)
