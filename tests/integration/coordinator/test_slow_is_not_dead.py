"""Members that are slow, stopped or killed, their witness and the leader, all of them real.

The limits without evidence are so long that every death here is one by evidence.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import forked
from support.coordinators import Replicas
from support.dcs_nodes import Nodes
from support.etcd_server import EtcdServers
from support.leader import Leader
from support.tiers import full
from support.waiting import wait_until

from elastic_rl.config import Config, parse
from elastic_rl.coordinator.alerts.state_machine import Alert
from elastic_rl.coordinator.records import LastSeen
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import LEASE_HEARTBEATS, deregister, members
from elastic_rl.etcd.records import Event
from elastic_rl.etcd.witness import HostWitness

TTL_S = 1
NAME = ("actor", "a")


@pytest.fixture
def cfg() -> Config:
    return parse({"job": "x", "coordinator": {"lease_ttl_s": 2, "reconcile_interval_s": 0.1, "suspicion_s": 600.0,
                                              "host_lost_s": 600.0}})


@pytest.fixture
def lead(etcd: EtcdClient, keys: Keys, cfg: Config) -> Iterator[Callable[[str], Leader]]:
    made: list[Leader] = []

    def make(name: str) -> Leader:
        made.append(Leader(etcd, keys, cfg, name))
        return made[-1]

    yield make
    for leader in made:
        leader.close()


@pytest.fixture
def witness(etcd: EtcdClient, keys: Keys) -> Iterator[HostWitness]:
    made = HostWitness(etcd, keys, "w", ttl_s=TTL_S).start()
    yield made
    made.close()


@pytest.fixture
def actor(etcd_servers: EtcdServers, keys: Keys, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The member actor/a."""
    with (tmp_path / "member.log").open("w") as log:
        process = forked.ForkedProcess(["support.member_process", ",".join(etcd_servers.endpoints), keys.job, *NAME,
                                        str(TTL_S)], stdin=subprocess.PIPE, stdout=log, stderr=log, text=True)
        yield process
        process.kill()
        process.wait(60)


class View:
    """What etcd says about the actor."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self.etcd, self.keys = etcd, keys

    def entry(self) -> LastSeen | None:
        found = self.etcd.get(self.keys.registry_entry(*NAME))
        return LastSeen.decode(found.value) if found else None

    def events(self, what: str) -> list[Event]:
        return [e for e in events.recent(self.etcd, self.keys, 1000) if e.kind == f"actor.{what}"]

    def alerts(self) -> list[str]:
        return [Alert.decode(kv.value).key for kv in self.etcd.range(self.keys.alerts_prefix())[0]]

    def registered(self) -> bool:
        return self.etcd.get(self.keys.member(*NAME)) is not None

    def until(self, check: Callable[[], Any], what: str) -> None:
        wait_until(check, what=what)

    def until_watched(self) -> None:
        """Until the leader knows the member, and its witness has had the time to see it alive."""
        self.until(self.entry, "the registry entry")
        self.until(lambda: members(self.etcd, self.keys, "actor")[0].step > 60, "three seconds of work")


@pytest.fixture
def view(etcd: EtcdClient, keys: Keys) -> View:
    return View(etcd, keys)


def hold_the_gil(process: subprocess.Popen[str], seconds: float) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{seconds}\n")
    process.stdin.flush()


def test_process_that_holds_the_gil_beyond_its_lease_returns_without_an_alert(
        lead: Callable[[str], Leader], witness: HostWitness, actor: subprocess.Popen[str], view: View) -> None:
    lead("a")
    view.until_watched()
    hold_the_gil(actor, 4.0 * LEASE_HEARTBEATS * TTL_S)
    view.until(lambda: view.events("suspected"), "the suspicion")
    assert view.entry().suspected and not view.registered()
    view.until(lambda: view.events("alive"), "its return")
    assert view.registered() and not view.entry().suspected
    assert not view.events("dead") and not view.events("returned") and view.alerts() == []


def test_killed_process_is_dead_by_the_word_of_its_witness(
        lead: Callable[[str], Leader], witness: HostWitness, actor: subprocess.Popen[str], view: View) -> None:
    lead("a")
    view.until_watched()
    actor.kill()  # and not waited for: it stays a zombie
    view.until(lambda: view.events("dead"), "the death")
    (death,) = view.events("dead")
    assert "its process is gone (w)" in death.message
    assert view.entry().dead and not view.registered()
    view.until(lambda: view.alerts() == ["actor.dead/a"], "the alert")


def test_process_that_is_ended_on_purpose_and_deregistered_is_not_dead(
        lead: Callable[[str], Leader], witness: HostWitness, actor: subprocess.Popen[str], view: View) -> None:
    lead("a")
    view.until_watched()
    found = members(view.etcd, view.keys, "actor")
    actor.kill()
    deregister(view.etcd, view.keys, found)
    view.until(lambda: view.etcd.count(f"{view.keys.root}processes/") == 0, "the end of its lease")
    assert view.entry() is None and not view.events("dead") and view.etcd.count(view.keys.evidence_prefix()) == 0


def test_stopped_process_is_dead_and_returns_when_it_goes_on(
        lead: Callable[[str], Leader], witness: HostWitness, actor: subprocess.Popen[str], view: View) -> None:
    lead("a")
    view.until_watched()
    actor.send_signal(signal.SIGSTOP)
    view.until(lambda: view.events("dead"), "the death")
    assert "its process is stopped (w)" in view.events("dead")[0].message
    actor.send_signal(signal.SIGCONT)
    view.until(lambda: view.events("returned"), "its return")
    assert view.registered() and view.etcd.count(view.keys.evidence_prefix()) == 0
    view.until(lambda: view.alerts() == [], "the end of the alert")


@full(proved_in="tests/unit/etcd/test_witness.py tests/unit/coordinator/test_member_registry.py",
      why="the rule with real processes")
def test_process_that_gets_hardly_any_time_is_not_dead(
        lead: Callable[[str], Leader], etcd: EtcdClient, keys: Keys, actor: subprocess.Popen[str], view: View) -> None:
    """It runs for some milliseconds of each second, and is found stopped by every look in between."""
    lead("a")
    # A stop by this test of 0.8 s may last longer on a busy machine, but not for so long.
    with HostWitness(etcd, keys, "w", ttl_s=15).start():
        view.until_watched()
        end = time.monotonic() + 6.0 * LEASE_HEARTBEATS * TTL_S
        while time.monotonic() < end:
            actor.send_signal(signal.SIGSTOP)
            time.sleep(0.8)
            actor.send_signal(signal.SIGCONT)
            time.sleep(0.005)
        view.until(lambda: view.registered() and not view.entry().suspected, "its return")
        assert not view.events("dead") and view.alerts() == []


@full(proved_in="tests/unit/etcd/test_witness.py tests/unit/coordinator/test_member_registry.py",
      why="the rule with real processes")
def test_next_leader_goes_on_with_suspicion_and_evidence(
        lead: Callable[[str], Leader], witness: HostWitness, actor: subprocess.Popen[str], view: View) -> None:
    first = lead("a")
    view.until_watched()
    hold_the_gil(actor, 5.0 * LEASE_HEARTBEATS * TTL_S)
    view.until(lambda: view.events("suspected"), "the suspicion")
    first.close()
    second = lead("b")
    view.until(lambda: view.events("alive"), "its return")
    assert len(view.events("suspected")) == 1 and not view.events("dead")
    second.close()
    actor.kill()
    view.until(lambda: view.etcd.count(view.keys.evidence_prefix()), "the evidence, which no leader reads")
    lead("c")
    view.until(lambda: view.events("dead"), "the death")
    assert "its process is gone" in view.events("dead")[0].message


@full(proved_in="tests/unit/etcd/test_witness.py tests/unit/coordinator/test_member_registry.py",
      why="the rule with real processes")
def test_restarted_witness_reports_what_it_has_seen_alive_itself(
        lead: Callable[[str], Leader], etcd: EtcdClient, keys: Keys, actor: subprocess.Popen[str], view: View) -> None:
    lead("a")
    view.until_watched()
    with HostWitness(etcd, keys, "w1", ttl_s=TTL_S).start():
        view.until(lambda: etcd.count(keys.witnesses_prefix()) == 1, "the first witness")
    assert etcd.count(keys.witnesses_prefix()) == 0
    looked: list[int] = []
    with HostWitness(etcd, keys, "w2", ttl_s=TTL_S) as second:
        see, second._look_at = second._look_at, lambda pid, started: (looked.append(pid), see(pid, started))[1]
        second.start()
        view.until(lambda: actor.pid in looked, "a look at the process")
        actor.kill()
        view.until(lambda: view.events("dead"), "the death")
    assert "(w2)" in view.events("dead")[0].message


def test_killed_and_stopped_durable_processes_are_reported_dead_by_their_peers(
        etcd: EtcdClient, keys: Keys, etcd_servers: EtcdServers, tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, keys, etcd_servers.endpoints,
                        {"coordinator": {"suspicion_s": 600.0, "host_lost_s": 600.0}})
    nodes = Nodes(etcd_servers=etcd_servers, etcd=etcd, keys=keys, folder=tmp_path)

    def death(kind: str) -> str:
        found = wait_until(lambda: [e for e in events.recent(etcd, keys, 1000) if e.kind == kind],
                           what=kind)
        return found[0].message

    try:
        replicas.start("a", "b")
        nodes.start_node("n0")
        wait_until(lambda: etcd.get(keys.registry_entry("dcs", "n0")), what="its registry entry")
        wait_until(lambda: etcd.count(keys.witnesses_prefix()) == 3, what="three witnesses")
        time.sleep(3.0)  # each of them lists the processes once a second
        nodes.processes["n0"].send_signal(signal.SIGSTOP)
        assert "its process is stopped" in death("dcs.dead")
        nodes.processes["n0"].send_signal(signal.SIGCONT)
        assert "n0 is back" in death("dcs.returned") and etcd.count(keys.evidence_prefix()) == 0
        leader = replicas.leader()
        replicas.kill(leader)
        assert f"coordinator {leader}" in death("coordinator.dead") and "its process is gone" in death(
            "coordinator.dead")
        nodes.kill("n0")
        wait_until(lambda: sum(e.kind == "dcs.dead" for e in events.recent(etcd, keys, 1000)) == 2,
                   what="the second death")
    finally:
        nodes.close()
        replicas.close()
