"""What a driver makes of the hosts of its cluster: where nothing more is placed, what leaves, and who is missing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_rl.driver import hosts_of_ray
from elastic_rl.driver.hosts_of_ray import HostNode, HostsOfRay, RayHosts
from elastic_rl.etcd.cluster_records import Host, HostPhase, HostState
from elastic_rl.etcd.keys import ClusterKeys

KEYS = ClusterKeys("lab")


class Cluster:
    """``states``: the hosts in etcd. ``nodes``: of Ray, by host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: dict[str, HostState] = {}
        self.nodes: list[str] = []
        self.asked = 0
        self.now = 1000.0
        monkeypatch.setattr(hosts_of_ray, "Mirror", lambda *_: self)
        monkeypatch.setattr(hosts_of_ray.ray, "nodes", self._nodes)
        monkeypatch.setattr(hosts_of_ray, "available_resources_per_node", lambda: {
            f"id-{name}": {"CPU": 4.0, "GPU": 2.0} for name in self.nodes if name != "a"})
        monkeypatch.setattr(hosts_of_ray.time, "monotonic", lambda: self.now)
        self._hosts = HostsOfRay(None, KEYS)  # type: ignore[arg-type]

    def read(self, timeout_s: float) -> dict[str, HostState]:
        return {KEYS.host_state(name): state for name, state in self.states.items()}

    def _nodes(self) -> list[dict[str, Any]]:
        self.asked += 1
        return [{"NodeID": f"id-{name}", "NodeName": name, "NodeManagerAddress": f"at-{name}",
                 "Alive": not name.startswith("dead")} for name in self.nodes]

    def have(self, **phases: HostPhase) -> None:
        self.states = {name: HostState(phase=phase, incarnation="i", since_s=0.0) for name, phase in phases.items()}

    def reads_labels(self) -> None:
        self._hosts = HostsOfRay(None, KEYS, reads_labels=True)  # type: ignore[arg-type]
        registered = {KEYS.host_registration("a"): Host(id="a", incarnation="i", labels={"zone": "1"})}
        self._hosts._registrations = SimpleNamespace(read=lambda timeout_s: registered)  # type: ignore[assignment]

    def counts_gpus(self) -> None:
        self._hosts.counts_gpus = True

    def hosts(self, *, joining: bool = False) -> RayHosts:
        return self._hosts.read(joining=joining)


def test_nothing_is_placed_on_a_host_that_is_not_ready_and_ray_is_not_asked_in_each_pass(
        monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.nodes = ["head@a", "a", "b", "c"]
    cluster.have(a=HostPhase.READY, b=HostPhase.CORDONED, c=HostPhase.SUSPECTED, d=HostPhase("frozen"))
    for _ in range(2):
        assert cluster.hosts() == RayHosts(closed=frozenset("bcd"), open=frozenset("a"), looked_at=1000.0, nodes={
            "head@a": HostNode("id-head@a", "at-head@a"), **{n: HostNode(f"id-{n}", f"at-{n}") for n in "abc"}})
    assert cluster.asked == 1
    cluster.now += hosts_of_ray._LOOK_EVERY_S

    # What drains keeps leaving while its agent is not heard.
    for phase in (HostPhase.DRAINING, HostPhase.SUSPECTED, HostPhase.LEFT):
        cluster.states["b"] = HostState(phase=phase, incarnation="i", since_s=0.0, drain_at=7.0)
        found = cluster.hosts()
        assert not found.overdue
        assert (found.leaving, found.drains, found.closed) == ({"id-b": "b"}, {"b": 7.0}, frozenset("bcd"))
        assert found.lost == (frozenset("b") if phase is HostPhase.LEFT else frozenset())
    cluster.states["b"] = cluster.states["b"].replace(drain_overdue=True)
    found = cluster.hosts()
    assert found.overdue == frozenset("b") and found.is_overdue("id-b") and not found.is_overdue("id-a")
    assert cluster.asked == 2, "not in each pass"
    cluster.now += hosts_of_ray._LOOK_EVERY_S
    cluster.nodes = ["a"]
    assert not cluster.hosts().leaving and cluster.asked == 3


def test_hosts_that_are_ready_and_have_joined_say_which_gpus_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.nodes = ["head@a", "a", "b", "c"]
    cluster.have(a=HostPhase.READY, b=HostPhase.READY, c=HostPhase.LOST, d=HostPhase.READY)
    cluster.counts_gpus()
    found = cluster.hosts()
    assert found.open == frozenset("ab")
    assert (found.nodes["a"], found.nodes["b"]) == (HostNode("id-a", "at-a"), HostNode("id-b", "at-b", gpus=2))
    assert found.lost == frozenset("c")


def test_labels_of_hosts_are_read_where_somebody_selects_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.have(a=HostPhase.READY)
    assert not cluster.hosts().labels
    cluster.reads_labels()
    assert cluster.hosts().labels == {"a": {"zone": "1"}}


def test_engines_wait_for_ready_hosts_that_have_not_joined_but_for_a_few_of_many(monkeypatch: pytest.MonkeyPatch
                                                                                 ) -> None:
    cluster = Cluster(monkeypatch)
    cluster.nodes = ["head@a", "a", "deadb"]
    cluster.have(a=HostPhase.READY, b=HostPhase.READY, c=HostPhase.CORDONED)
    assert cluster.hosts(joining=True).missing == ("b",) and cluster.hosts().missing == ()
    cluster.nodes.append("b")
    assert cluster.hosts(joining=True).missing == ()

    cluster.have(**{f"h{n}": HostPhase.READY for n in range(100)})
    cluster.nodes = [f"h{n}" for n in range(94)]
    assert len(cluster.hosts(joining=True).missing) == 6
    cluster.nodes.append("h94")
    assert cluster.hosts(joining=True).missing == ()
