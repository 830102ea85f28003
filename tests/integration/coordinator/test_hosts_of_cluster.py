"""Hosts in the admin API: read from a real etcd, as a real leader and the tests in place of agents write them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from support.api_cluster import ApiCluster, problem, running, walk
from support.coordinators import VIEWER
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl.coordinator.client.admin_client import AdminClient, Changed, NotFound
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.coordinator.cluster_pass import ClusterLimits
from elastic_rl.coordinator.cluster_reconciler import ClusterReconciler
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.hosts import changes
from elastic_rl.coordinator.hosts import view as hosts
from elastic_rl.coordinator.hosts.view import HostReading, HostView
from elastic_rl.coordinator.problems import Problem
from elastic_rl.etcd.client import EtcdClient, Page
from elastic_rl.etcd.cluster_records import (
    Assignment,
    Drain,
    Host,
    HostPhase,
    HostSpec,
    HostState,
    HostStatus,
    JobRecord,
    RunState,
    ServiceStatus,
    driver_of,
)
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.transaction import Op

DRIVER = driver_of("j")


@dataclass
class Agents:
    """Writes what the agents of hosts would."""

    etcd: EtcdClient
    keys: ClusterKeys
    services: dict[str, ServiceStatus] = field(default_factory=lambda: {
        "dcs-j": ServiceStatus(state=RunState.RUNNING, pid=7), "x": ServiceStatus(state=RunState.ENDED, restarts=2)})

    def register(self, *names: str, report: bool = True) -> None:
        for name in names:
            record = Host(id=name, incarnation=f"{name}-1", address="10.0.0.7", cpus=8, memory_bytes=1 << 34).encode()
            revision = self.etcd.txn([], [Op.put(self.keys.host(name), record),
                                          Op.put(self.keys.host_registration(name), record)]).revision
            if report:
                self.etcd.put(self.keys.host_status(name), HostStatus(
                    registration=revision, observed_revision=revision, services=self.services).encode())

    def leave(self, name: str) -> None:
        """What the end of the agent's lease deletes."""
        self.etcd.txn([], [Op.delete(self.keys.host(name)), Op.delete(self.keys.host_status(name))])


@pytest.fixture
def cluster_keys() -> ClusterKeys:
    return ClusterKeys(f"c-{secrets.token_hex(6)}")


@pytest.fixture
def agents(etcd: EtcdClient, cluster_keys: ClusterKeys) -> Agents:
    return Agents(etcd, cluster_keys)


# -- as the leader writes them -----------------------------------------------------------------------------------------
def test_host_is_shown_from_its_registration_until_it_is_lost(
        etcd: EtcdClient, cluster_keys: ClusterKeys, agents: Agents) -> None:
    now, limits = [0.0], ClusterLimits()
    election = Election(etcd, cluster_keys, "r0", "", 10).start()
    leader = ClusterReconciler(etcd, cluster_keys, election, limits, monotonic=lambda: now[0])

    def shown() -> HostView:
        (listed,), more = hosts.page(etcd, cluster_keys, 10)
        assert not more and hosts.get_host(etcd, cluster_keys, "h1") == listed
        return listed

    def decide() -> HostView:
        wait_until(lambda: leader.reconcile_once() == 0, what="a pass that has nothing to write")
        return shown()

    try:
        wait_until(lambda: election.is_leader, what="the leadership")
        agents.register("h1")
        assert (shown().phase, shown().phase_age_s, shown().assignments) == (HostPhase.JOINING, None, {})
        etcd.put(cluster_keys.job("j"), JobRecord(submission=1).encode())
        ready = decide()
        assert (ready.phase, ready.reason, ready.registered) == (HostPhase.READY, "", True)
        assert ready.services == agents.services and list(ready.assignments) == [DRIVER]
        held = etcd.get(cluster_keys.assignment(DRIVER))
        assert held is not None and ready.assignments[DRIVER].generation == held.version
        assert ready.assignments[DRIVER].incarnation == ready.incarnation == "h1-1"
        now[0] = 100.0
        assert decide().phase_age_s == 100.0
        agents.leave("h1")
        suspected = decide()
        assert (suspected.phase, suspected.phase_age_s, suspected.registered) == (HostPhase.SUSPECTED, 0.0, False)
        assert suspected.services == {} and list(suspected.assignments) == [DRIVER]
        now[0] += limits.times.lost_s
        assert decide().phase is HostPhase.LOST
        now[0] += 50.0
        lost = decide()
        assert (lost.phase_age_s, lost.address, lost.cpus, lost.registered) == (50.0, "10.0.0.7", 8, False)
        agents.register("h1")
        assert decide().phase is HostPhase.READY
    finally:
        leader.stop()
        election.stop()


def test_unknown_host_is_not_found(etcd: EtcdClient, cluster_keys: ClusterKeys, agents: Agents) -> None:
    etcd.put(cluster_keys.host_spec("h1"), HostSpec(cordoned=True).encode())
    agents.register("h10")
    assert [host.id for host in hosts.page(etcd, cluster_keys, 10)[0]] == ["h10"]
    with pytest.raises(Problem, match="no host 'h1'"):
        hosts.get_host(etcd, cluster_keys, "h1")


def test_assignment_that_cannot_be_read_hides_no_host(
        etcd: EtcdClient, cluster_keys: ClusterKeys, agents: Agents, caplog: pytest.LogCaptureFixture) -> None:
    agents.register("h1")
    etcd.put(cluster_keys.assignment(DRIVER), b"{")
    assert [host.assignments for host in hosts.page(etcd, cluster_keys, 10)[0]] == [{}]
    assert cluster_keys.assignment(DRIVER) in caplog.text


# -- pages -------------------------------------------------------------------------------------------------------------
def test_pages_hold_each_host_once_under_whichever_keys_it_is(
        etcd: EtcdClient, cluster_keys: ClusterKeys, agents: Agents) -> None:
    agents.register("a", "a-1", "b", "c", "ä", report=False)
    agents.register("b1", "d")
    agents.leave("c")
    for name in ("a", "aa", "c", "e"):
        etcd.put(cluster_keys.host_state(name), HostState(
            phase=HostPhase.LOST, incarnation=f"{name}-1", since_s=0.0).encode())
    etcd.put(cluster_keys.host_spec("d"), HostSpec(cordoned=True).encode())
    every, more = hosts.page(etcd, cluster_keys, 100)
    assert [host.id for host in every] == ["a", "a-1", "aa", "b", "b1", "c", "d", "e", "ä"] and not more
    assert [host.id for host in every if host.services] == ["b1", "d"]
    assert [host.id for host in every if host.spec.cordoned] == ["d"]
    assert [host.id for host in every if host.phase is HostPhase.LOST] == ["a", "aa", "c", "e"]
    assert [host.id for host in every if not host.registered] == ["aa", "c", "e"]
    for limit in range(1, 10):
        walked, more, last = list[HostView](), True, ""
        while more:
            page, more = hosts.page(etcd, cluster_keys, limit, last)
            assert len(page) == limit or not more
            walked, last = walked + page, page[-1].id
        assert walked == every, limit
    assert hosts.page(etcd, cluster_keys, 5, "ä") == ([], False)


def test_reads_of_a_page_do_not_grow_with_the_hosts(
        etcd: EtcdClient, cluster_keys: ClusterKeys, agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read_page = EtcdClient.page

    def page(client: EtcdClient, prefix: str, **more: object) -> Page:
        reads.append(prefix)
        return read_page(client, prefix, **more)  # type: ignore[arg-type]

    names = [f"h{n:04d}" for n in range(1000)]
    for start in range(0, 1000, 100):
        etcd.txn([], [Op.put(cluster_keys.host(name), Host(id=name, incarnation="i").encode())
                      for name in names[start:start + 100]])
    monkeypatch.setattr(EtcdClient, "page", page)
    assert [host.id for host in hosts.page(etcd, cluster_keys, 1000)[0]] == names
    assert len(reads) < 30, "a range is read in pages of 1 MiB"


# -- what operators want -----------------------------------------------------------------------------------------------
@pytest.fixture
def leader(etcd: EtcdClient, cluster_keys: ClusterKeys) -> Iterator[Callable[[], None]]:
    """Has the leader make passes until nothing is left to write."""
    election = Election(etcd, cluster_keys, "r0", "", 10).start()
    reconciler = ClusterReconciler(etcd, cluster_keys, election, ClusterLimits(), monotonic=lambda: 0.0)
    wait_until(lambda: election.is_leader, what="the leadership")
    yield lambda: wait_until(lambda: reconciler.reconcile_once() == 0, what="a pass that has nothing to write")
    reconciler.stop()
    election.stop()


def test_host_is_cordoned_drained_and_used_again(
        etcd: EtcdClient, cluster_keys: ClusterKeys, agents: Agents, leader: Callable[[], None]) -> None:
    def shown() -> HostView:
        leader()
        return hosts.get_host(etcd, cluster_keys, "h1")

    def ask(**wanted: Any) -> HostView:
        return changes.change(etcd, cluster_keys, "h1", wanted, by="ann", clock=lambda: 9.0)

    agents.services = {}
    agents.register("h1")
    leader()
    asked = ask(cordoned=True, reason="ECC errors")
    assert asked.spec == HostSpec(cordoned=True, reason="ECC errors", by="ann", at=9.0)
    assert (shown().phase, shown().reason) == (HostPhase.CORDONED, "cordoned by ann: ECC errors")
    etcd.put(cluster_keys.job("j"), JobRecord(submission=1).encode())
    assert shown().assignments == {}, "nothing more is given to it"
    ask(cordoned=False)
    assert shown().phase is HostPhase.READY and list(shown().assignments) == [DRIVER]
    ask(drain=Drain(within_s=0.0))
    assert (shown().phase, list(shown().assignments)) == (HostPhase.DRAINING, [DRIVER]), "there is no other host"
    agents.register("h2")
    assert (shown().phase, shown().assignments, shown().reason) == (HostPhase.LEFT, {}, "was drained by ann")
    assert list(hosts.get_host(etcd, cluster_keys, "h2").assignments) == [DRIVER]
    ask(drain=None)
    assert shown().phase is HostPhase.READY and shown().assignments == {}, "nothing moves back"


def test_change_is_of_the_host_as_it_was_read(
        etcd: EtcdClient, cluster_keys: ClusterKeys, agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(revision: int | None = None, **wanted: Any) -> HostView:
        return changes.change(etcd, cluster_keys, "h1", wanted, by="ann", if_revision=revision)

    with pytest.raises(Problem, match="no host 'h1'"):
        ask(cordoned=True)
    agents.register("h1")
    revision = int(ask(0, cordoned=True).etag.strip('"'))
    assert hosts.get_host(etcd, cluster_keys, "h1").etag == f'"{revision}"'
    with pytest.raises(Problem, match="has changed|ETag"):
        ask(0, cordoned=False)
    assert ask(revision, cordoned=True).etag == f'"{revision}"', "nothing changes"
    again = ask(revision, cordoned=True, reason="other disk")
    assert again.spec.reason == "other disk" and again.etag != f'"{revision}"'
    drained = ask(drain=Drain(within_s=5.0))
    assert ask(cordoned=False).spec == drained.spec.replace(cordoned=False), "its time does not begin anew"
    drained = ask(cordoned=True)
    assert drained.spec.cordoned and ask(drain=Drain(within_s=5.0)).etag != drained.etag, "its time begins anew"
    read = changes.read_host

    def changed_meanwhile(*args: Any) -> HostReading:
        found = read(*args)
        monkeypatch.undo()
        etcd.put(cluster_keys.host_spec("h1"), HostSpec(cordoned=True, reason="other").encode())
        return found

    monkeypatch.setattr(changes, "read_host", changed_meanwhile)
    used = ask(cordoned=False)
    assert (used.spec.cordoned, used.spec.drain) == (False, None), "on top of what another operator has written"
    assert hosts.get_host(etcd, cluster_keys, "h1") == used
    etcd.put(cluster_keys.host_spec("h1"), b"{")
    with pytest.raises(Problem, match="later release"):
        ask(cordoned=True)


def test_only_a_host_that_is_gone_and_holds_nothing_is_forgotten(
        etcd: EtcdClient, cluster_keys: ClusterKeys, agents: Agents) -> None:
    def forget(**more: Any) -> HostView:
        return changes.forget(etcd, cluster_keys, "h1", by="ann", **more)

    def conclude(phase: HostPhase) -> None:
        etcd.put(cluster_keys.host_state("h1"), HostState(phase=phase, incarnation="h1-1", since_s=0.0).encode())

    with pytest.raises(Problem, match="no host 'h1'"):
        forget()
    agents.register("h1", "h10")
    conclude(HostPhase.LOST)
    with pytest.raises(Problem, match="is registered"):
        forget()
    agents.leave("h1")
    conclude(HostPhase.SUSPECTED)
    with pytest.raises(Problem, match="host h1 is suspected"):
        forget()
    conclude(HostPhase.LOST)
    held = Assignment(host="h1", incarnation="h1-1")
    etcd.put(cluster_keys.assignment(DRIVER), held.encode())
    with pytest.raises(Problem, match=f"{DRIVER} moves as soon as"):
        forget()
    etcd.put(cluster_keys.assignment(DRIVER), held.replace(host="h10").encode())
    etcd.put(cluster_keys.host_spec("h1"), HostSpec(cordoned=True).encode())
    assert forget(dry_run=True).id == "h1" and hosts.get_host(etcd, cluster_keys, "h1").spec.cordoned
    assert forget().phase is HostPhase.LOST
    assert [host.id for host in hosts.page(etcd, cluster_keys, 10)[0]] == ["h10"]
    assert etcd.get(cluster_keys.host_spec("h1")) is None
    agents.register("h1")  # while nobody leads
    agents.leave("h1")
    etcd.put(cluster_keys.assignment(DRIVER), b"{")
    with pytest.raises(Problem, match="cannot be read"):
        forget()
    etcd.delete(cluster_keys.assignment(DRIVER))
    assert forget().phase is HostPhase.JOINING
    assert etcd.get(cluster_keys.host_registration("h1")) is None


@pytest.mark.parametrize("meanwhile", ["registers", "is assigned", "is suspected", "is drained"])
def test_host_that_changes_while_it_is_forgotten_is_decided_about_anew(
        etcd: EtcdClient, cluster_keys: ClusterKeys, agents: Agents, monkeypatch: pytest.MonkeyPatch, meanwhile: str
        ) -> None:
    state = HostState(phase=HostPhase.LEFT, incarnation="1", since_s=0.0)
    etcd.put(cluster_keys.host_state("h1"), state.encode())
    read, readings = changes.read_host, list[HostReading]()

    def changes_meanwhile(*args: Any) -> HostReading:
        readings.append(found := read(*args))
        if len(readings) == 1:
            match meanwhile:
                case "registers":
                    agents.register("h1")
                case "is assigned":
                    etcd.put(cluster_keys.assignment(DRIVER), Assignment(host="h1", incarnation="1").encode())
                case "is suspected":
                    etcd.put(cluster_keys.host_state("h1"), state.replace(phase=HostPhase.SUSPECTED).encode())
                case "is drained":
                    changes.change(etcd, cluster_keys, "h1", {"drain": Drain(within_s=1.0)}, by="bob")
        return found

    monkeypatch.setattr(changes, "read_host", changes_meanwhile)
    if meanwhile == "is drained":
        assert changes.forget(etcd, cluster_keys, "h1", by="ann").spec.drain is not None
    else:
        with pytest.raises(Problem, match="is registered|is suspected|moves as soon as"):
            changes.forget(etcd, cluster_keys, "h1", by="ann")
    assert len(readings) >= 2


def test_host_that_is_forgotten_while_it_is_changed_leaves_nothing(
        etcd: EtcdClient, cluster_keys: ClusterKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    etcd.put(cluster_keys.host_state("h1"),
             HostState(phase=HostPhase.LEFT, incarnation="1", since_s=0.0).encode())
    read = changes.read_host

    def forgotten_meanwhile(*args: Any) -> HostReading:
        found = read(*args)
        monkeypatch.undo()
        changes.forget(etcd, cluster_keys, "h1", by="bob")
        return found

    monkeypatch.setattr(changes, "read_host", forgotten_meanwhile)
    with pytest.raises(Problem, match="no host 'h1'"):
        changes.change(etcd, cluster_keys, "h1", {"cordoned": True}, by="ann")
    assert etcd.get(cluster_keys.host_spec("h1")) is None


# -- over HTTP ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def cluster(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiCluster]:
    with running(etcd_servers, tmp_path_factory.mktemp("hosts"), "a") as made:
        yield made


@pytest.fixture
def api(cluster: ApiCluster) -> Iterator[httpx.Client]:
    with cluster.client("a") as client:
        yield client


def test_hosts_are_listed_filtered_and_read_over_http(cluster: ApiCluster, api: httpx.Client) -> None:
    keys = ClusterKeys(cluster.keys.job)
    names = [f"h{n:02d}" for n in range(12)]
    Agents(cluster.etcd, keys).register(*names)
    state = HostState(phase=HostPhase.READY, incarnation="", since_s=0.0)
    cluster.bulk([(keys.host_state(name), state.replace(incarnation=f"{name}-1")) for name in names]
                 + [(keys.host_state(f"x{n}"), state.replace(phase=HostPhase.LOST)) for n in range(5)])
    every = walk(api, "/v1/hosts", 5)
    assert [host["id"] for host in every] == [*names, *(f"x{n}" for n in range(5))]
    assert [host["id"] for host in walk(api, "/v1/hosts?phase=lost", 2)] == [f"x{n}" for n in range(5)]
    assert [host["id"] for host in walk(api, "/v1/hosts?phase=ready", 12)] == names
    assert walk(api, "/v1/hosts?phase=cordoned", 3) == []
    one = api.get("/v1/hosts/h03")
    assert one.status_code == 200 and one.json()["services"] == every[3]["services"] != {}
    assert (one.json()["phase"], one.json()["address"]) == ("ready", "10.0.0.7")
    assert problem(api.get("/v1/hosts/h1"), 404, "not-found")["detail"] == "there is no host 'h1'"
    problem(api.get("/v1/hosts?phase=asleep"), 422, "invalid")
    problem(api.get("/v1/hosts?after=%21"), 422, "invalid")
    problem(api.get("/v1/hosts?phases=lost"), 422, "unknown-parameter")
    problem(api.get("/v1/hosts", headers={"Authorization": ""}), 401, "unauthorized")
    cluster.etcd.put(keys.host_status("h03"), b"{")
    damaged = api.get("/v1/hosts/h03").json()
    assert damaged["services"] == {} and list(damaged["unreadable"]) == [keys.host_status("h03")]
    assert len(walk(api, "/v1/hosts", 100)) == 17


def test_operators_change_and_forget_hosts_over_http(cluster: ApiCluster, api: httpx.Client) -> None:
    keys, agents = ClusterKeys(cluster.keys.job), Agents(cluster.etcd, ClusterKeys(cluster.keys.job))
    agents.register("o1")
    path, any_tag = "/v1/hosts/o1", {"If-Match": "*"}
    etag = api.get(path).headers["etag"]
    problem(api.patch(path, json={"cordoned": True}), 428, "precondition-required")
    for body in ({}, {"reason": "x"}, {"cordoned": 1}, {"drain": {"within_s": -1}}, {"drain": {"within_s": 1e9}},
                 {"drain": True}, {"cordoned": True, "reason": "x" * 501}, {"cordoned": True, "phase": "lost"}):
        problem(api.patch(path, json=body, headers=any_tag), 422, "invalid")
    would = api.patch(f"{path}?dry_run=true", json={"drain": {}}, headers={"If-Match": etag})
    assert would.json()["spec"]["drain"] == {"within_s": 600.0, "incarnation": ""}
    assert api.get(path).headers["etag"] == etag
    done = api.patch(path, json={"cordoned": True, "reason": "disk"}, headers={"If-Match": etag})
    assert done.status_code == 200 and done.headers["etag"] == api.get(path).headers["etag"] != etag
    spec = done.json()["spec"]
    assert (spec["cordoned"], spec["reason"], spec["by"]) == (True, "disk", "operator") and spec["at"] > 1e9
    problem(api.patch(path, json={"cordoned": False}, headers={"If-Match": etag}), 412, "precondition-failed")
    problem(api.patch("/v1/hosts/o2", json={"cordoned": True}, headers=any_tag), 404, "not-found")
    with cluster.client("a", headers={"Authorization": f"Bearer {VIEWER}"}) as viewer:
        problem(viewer.patch(path, json={"cordoned": True}, headers=any_tag), 403, "forbidden")
        problem(viewer.delete(path), 403, "forbidden")
    problem(api.delete(path), 409, "conflict")
    agents.leave("o1")
    cluster.etcd.put(keys.host_state("o1"), HostState(phase=HostPhase.LOST, incarnation="", since_s=0.0).encode())
    assert api.delete(f"{path}?dry_run=true").json()["phase"] == "lost"
    assert api.delete(path).json()["id"] == "o1"
    problem(api.delete(path), 404, "not-found")


def test_client_cordons_drains_and_forgets_hosts(cluster: ApiCluster) -> None:
    agents = Agents(cluster.etcd, ClusterKeys(cluster.keys.job))
    agents.register("p1")
    replicas = cluster.replicas
    client = AdminClient(ClusterInfo("", [], [replicas.urls["a"]], str(replicas.credentials)))
    assert client.change_host("p1", {"cordoned": True}, dry_run=True)["spec"]["cordoned"]
    assert not client.host("p1")["spec"]["cordoned"]
    drained = client.change_host("p1", {"drain": {"within_s": 5.0}})
    assert drained["spec"]["drain"]["within_s"] == 5.0
    with pytest.raises(NotFound):
        client.change_host("p2", {"cordoned": True})
    with pytest.raises(Changed, match="is registered"):
        client.forget_host("p1")
