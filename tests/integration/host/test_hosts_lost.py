"""Hosts of a cluster that lose their power, or their network, and come back: real etcd, coordinator, agents and DCS
nodes, and a stub in the place of a run's driver."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import pytest
from support.etcd_server import EtcdServers
from support.lab import Lab, lab_of
from support.stub_run import put_stub_in_place
from support.waiting import wait_until

SETTINGS = ("--coordinator.replicas=1", "--dcs.arena_bytes=33554432")
JOB = f"j-{secrets.token_hex(3)}"


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_of("abc", JOB) as made:
        made.start(*SETTINGS)
        yield made


def test_run_goes_on_elsewhere_when_its_host_loses_power_or_network(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = lab.machines.values()
    for host in "abc":
        wait_until(lambda host=host: lab.phase(host) == "ready", what=f"host {host}")
    put_stub_in_place(lab.folder, monkeypatch)
    a.run("train", "--detach", f"--job={lab.job}", *a.location, *SETTINGS)
    wait_until(lambda: lab.runs_on("a"), what="the run on the host that it was submitted on")
    wait_until(lambda: lab.nodes() == {"node-0", "host-b", "host-c"}, what="a DCS node on each host")
    a.run("drain", "a", "--within=0", "--wait", *a.location)
    wait_until(lambda: lab.runs_on("b"), what="the run on b")
    assert b.runs() and not c.runs()
    wait_until(lambda: not a.runs(), what="the end of the run on a")
    generation = lab.generation()

    # b loses its power.
    b.power_off()
    wait_until(lambda: lab.runs_on("c"), what="the run on c")
    assert lab.phase("b") == "lost" and lab.generation() == generation + 1
    wait_until(lambda: lab.nodes() == {"node-0", "host-c"}, what="the end of its node's lease")

    # c is cut off: it ends the run by itself, before another host has it, and keeps its DCS node.
    a.run("uncordon", "a", *a.location)
    wait_until(lambda: lab.phase("a") == "ready", what="host a")
    c.cut()
    wait_until(lambda: lab.phase("c") == "lost", what="the loss of c")
    assert not c.runs(), "its agent has ended the run before the host was lost"
    wait_until(lambda: lab.runs_on("a"), what="the run on a")
    assert c.cluster.services.get(c.cluster.node) is not None

    # Both come back: they hold nothing, and are fit.
    c.heal()
    b.power_on()
    b.join(lab.join_file)
    for host in "bc":
        wait_until(lambda host=host: lab.phase(host) == "ready", what=f"the return of {host}")
    wait_until(lambda: lab.nodes() == {"node-0", "host-b", "host-c"}, what="a DCS node on each host")
    assert lab.holder() == "a" and lab.runs_on("a") and not b.runs() and not c.runs()
    status = lab.status()
    assert status is not None and status.phase == "running" and status.submission == 1


def test_cluster_outlives_its_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an etcd of somebody else, and a coordinator on another host."""
    with lab_of("ab", JOB) as lab, contextlib.closing(EtcdServers(
            lab.folder / "etcd", 1, host=lab.network.etcd_address)) as etcd:
        a, b = lab.machines.values()
        settings = [*SETTINGS, f"--etcd.endpoints=[{','.join(etcd.start().endpoints)}]"]
        lab.start(*settings, joining=["--coordinator"])
        wait_until(lambda: lab.phase("a") == lab.phase("b") == "ready", what="both hosts")
        put_stub_in_place(lab.folder, monkeypatch)
        a.run("train", "--detach", f"--job={lab.job}", *a.location)
        wait_until(lambda: lab.runs_on("a"), what="the run on the first host")
        wait_until(lambda: lab.nodes() == {"node-0", "host-b"}, what="a DCS node on each host")
        lab.watched_from = b
        wait_until(lambda: lab.phase("a") == "ready", what="the second host's word")

        a.power_off()
        wait_until(lambda: lab.runs_on("b"), what="the run on the second host, by its coordinator")
        assert lab.phase("a") == "lost"
        generation = lab.generation()

        a.power_on()
        a.run("up", *a.location)
        wait_until(lambda: lab.phase("a") == "ready", what="the return of the first host")
        wait_until(lambda: lab.nodes() == {"node-0", "host-b"}, what="a DCS node on each host")
        assert (lab.holder(), lab.generation()) == ("b", generation) and lab.runs_on("b") and not a.runs()
        status = lab.status()
        assert status is not None and status.phase == "running" and status.submission == 1
