"""Hosts of a cluster that lose their power, or their network, and come back: real etcd, coordinator, agents and DCS
nodes, and a stub in the place of a run's driver."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest
from support.lab import LabHere, Machine, lab_here, lab_of
from support.stub_run import put_stub_in_place
from support.waiting import wait_until

from elastic_rl.host.join_file import JoinFile
from elastic_rl.host.test_hosts.bridge import interfaces
from elastic_rl.host.test_hosts.naming import is_of_tag, tag_of

SETTINGS = ("--coordinator.replicas=1", "--dcs.arena_bytes=33554432")
JOB = f"j-{secrets.token_hex(3)}"


@pytest.fixture
def lab() -> Iterator[LabHere]:
    with lab_here(3, JOB, *SETTINGS) as made:
        yield made


def test_run_goes_on_elsewhere_when_its_host_loses_power_or_network(
        lab: LabHere, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = lab.machines.values()
    assert [lab.phase(host) for host in lab.machines] == ["ready"] * 3, "`up` returns once the cluster has them all"
    put_stub_in_place(lab.folder, monkeypatch)
    lab.beside("train", "--detach", f"--job={lab.job}")
    wait_until(lambda: lab.runs_on(a.name), what="the run on the first host")
    all_nodes = {"node-0", f"host-{b.name}", f"host-{c.name}"}
    wait_until(lambda: lab.nodes() == all_nodes, what="a DCS node on each host")
    lab.beside("drain", a.name, "--within=0", "--wait")
    wait_until(lambda: lab.runs_on(b.name), what="the run on b")
    wait_until(b.runs, what="its processes")
    assert not c.runs()
    wait_until(lambda: not a.runs(), what="the end of the run on a")
    generation = lab.generation()

    # b loses its power.
    assert "powered off" in lab.beside("test-hosts", "power-off", b.name)
    wait_until(lambda: lab.runs_on(c.name), what="the run on c")
    assert lab.phase(b.name) == "lost" and lab.generation() == generation + 1
    wait_until(lambda: lab.nodes() == all_nodes - {f"host-{b.name}"}, what="the end of its node's lease")

    # c is cut off: it ends the run by itself, before another host has it, and keeps its DCS node.
    lab.beside("uncordon", a.name)
    wait_until(lambda: lab.phase(a.name) == "ready", what="host a")
    c.cut()
    wait_until(lambda: lab.phase(c.name) == "lost", what="the loss of c")
    assert not c.runs(), "its agent has ended the run before the host was lost"
    wait_until(lambda: lab.runs_on(a.name), what="the run on a")
    assert c.cluster.services.get(c.cluster.node) is not None

    # Both come back: they hold nothing, and are fit.
    lab.beside("up")
    assert [lab.phase(host) for host in lab.machines] == ["ready"] * 3
    wait_until(lambda: lab.nodes() == all_nodes, what="a DCS node on each host")
    assert lab.holder() == a.name and lab.runs_on(a.name) and not b.runs() and not c.runs()
    status = lab.status()
    assert status is not None and status.phase == "running" and status.submission == 1

    # Nothing of it is left when it is taken down.
    tag = tag_of(lab.first.cluster.paths.folder)
    assert any(is_of_tag(name, tag) for name in interfaces())
    lab.beside("down")
    assert not [name for name in interfaces() if is_of_tag(name, tag)]
    assert not any(machine.processes() or machine.cluster.services.running() for machine in lab.machines.values())


def test_cluster_outlives_its_first_host_and_the_loss_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a member of etcd and a coordinator on each host."""
    with lab_of("abc", JOB) as lab:
        a, b, c = lab.machines.values()
        lab.start(*SETTINGS, "--etcd.follow_members_s=2", joining=["--coordinator", "--etcd"])
        for host in "abc":
            wait_until(lambda host=host: lab.phase(host) == "ready", what=f"host {host}")
        wait_until(lambda: members(a) == dict.fromkeys(["etcd-0", "etcd-b", "etcd-c"], True), what="a vote for each")
        put_stub_in_place(lab.folder, monkeypatch)
        a.run("train", "--detach", f"--job={lab.job}", *a.location)
        wait_until(lambda: lab.runs_on("a"), what="the run on the first host")
        wait_until(lambda: lab.nodes() == {"node-0", "host-b", "host-c"}, what="a DCS node on each host")
        for machine in (a, b, c):
            wait_until(lambda machine=machine: len(endpoints(machine)) == 3, what="each host's word of all members")
        lab.watched_from = b

        a.power_off()
        wait_until(lambda: lab.runs_on("b") or lab.runs_on("c"), what="the run on another host, by its coordinator")
        assert lab.phase("a") == "lost"
        wait_until(lambda: members(b) == {"etcd-0": False, "etcd-b": True, "etcd-c": True}, what="what is left of etcd")
        generation, holder = lab.generation(), lab.holder()

        a.power_on()
        a.run("up", *a.location)
        wait_until(lambda: lab.phase("a") == "ready", what="the return of the first host")
        wait_until(lambda: all(members(a).values()), what="its member of etcd")
        wait_until(lambda: lab.holder(), what="an answer of a coordinator, whose connection to that member was open")
        assert (lab.holder(), lab.generation()) == (holder, generation) and not a.runs()

        # All of them lose their power. No one of them alone has a majority when it returns.
        for machine in (a, b, c):
            machine.power_off()
        for machine in (b, c):
            machine.power_on()
            machine.join(lab.join_file)
        wait_until(lambda: lab.phase("b") == lab.phase("c") == "ready", what="the return of two hosts")
        wait_until(lambda: lab.runs_on(lab.holder()), what="the run on one of them")
        status = lab.status()
        assert status is not None and status.phase == "running" and status.submission == 1

        # The first one is gone for good: its member is removed, and a host can still join.
        wait_until(lambda: members(b) == {"etcd-0": False, "etcd-b": True, "etcd-c": True}, what="the other members")
        b.run("etcd", "remove", "etcd-0", *b.location)
        wait_until(lambda: members(b) == {"etcd-b": True, "etcd-c": True}, what="the end of its member")
        wait_until(lambda: len(endpoints(c)) == 2, what="the word of the others")
        assert set(JoinFile.read(c.cluster.paths.join_file).etcd_endpoints) == set(endpoints(c))

        # It comes back all the same: it is a host of the others' cluster, and begins no second one.
        a.power_on()
        a.run("up", *a.location)
        wait_until(lambda: lab.phase("a") == "ready", what="the return of the first host")
        wait_until(lambda: members(a) == {"etcd-b": True, "etcd-c": True}, what="the others, by the first host")
        assert not a.cluster.paths.etcd.exists()


def members(machine: Machine) -> dict[str, bool]:
    """The members of etcd, as a machine lists them, and whether each votes and answers."""
    listed = json.loads(machine.run("etcd", "ls", "-o", "json", *machine.location))
    return {member["member"]: member["state"] in ("leads", "follows") for member in listed}


def endpoints(machine: Machine) -> list[str]:
    return machine.cluster.connect().etcd_endpoints
