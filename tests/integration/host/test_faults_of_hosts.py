"""Three hosts, each with a member of etcd, a coordinator and a DCS node, under faults in the worst moments: a join, a
drain and a take-over that are killed, a partition, and supervisors that hang while their driver goes on.

The driver is a stub that writes as the product's does and never ends by itself (``chaos_tests.traffic.driver_writes``).
After each fault, etcd must have taken the writes of one driver at a time.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

import psutil
import pytest
from support import killed_at, waiting
from support.killed_at import Point, after, before
from support.lab import Lab, Machine, lab_of
from support.stub_run import put_stub_in_place
from support.tiers import full

from chaos_tests.traffic import driver_writes
from chaos_tests.traffic.driver_writes import REFUSED, UNANSWERED, Driver
from chaos_tests.validate.assignments import superseded
from elastic_rl.etcd.cluster_records import Assignment, Host, HostSpec, driver_of
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.records import Leader
from elastic_rl.host.agent.host_facts import stored_incarnation

wait_until = partial(waiting.wait_until, poll_s=0.25)  # each look is a connection with TLS
PATIENCE_S = waiting.PATIENCE_S
JOB = f"j-{secrets.token_hex(3)}"
KEYS = ClusterKeys("lab")
SETTINGS = ("--coordinator.replicas=1", "--dcs.arena_bytes=33554432", "--etcd.follow_members_s=2")
_CLUSTER = "elastic_rl.host.local_cluster:Cluster."
_ETCD = "elastic_rl.etcd.client:EtcdClient."


class Hosts:
    """The lab, with what was killed while its last host joined."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        lab.folder.joinpath("kills").mkdir()
        folder = lab.folder / "kills"
        self.killed_commands = [before(f"{_CLUSTER}_take_secret", folder), after(f"{_CLUSTER}_certify", folder),
                                after(f"{_ETCD}add_learner", folder), after(f"{_CLUSTER}_spawn_etcd", folder),
                                before(f"{_CLUSTER}_start_agent", folder)]
        self.killed_agents = [before("elastic_rl.host.agent.host_session:HostSession._follow", folder),
                              before(f"{_ETCD}promote", folder), after(f"{_ETCD}promote", folder)]

    def start(self) -> None:
        a, b, c = self.lab.machines.values()
        self.before = {name: traces(machine) for name, machine in self.lab.machines.items()}
        a.run("up", *a.location, *SETTINGS, f"--address={a.address}", f"--name={a.name}")
        self.join(b)
        for point in self.killed_commands:
            assert self.join(c, point).wait(PATIENCE_S) == -signal.SIGKILL, point
        self.join(c, *self.killed_agents)
        self.await_all()

    def join(self, machine: Machine, *points: Point) -> subprocess.Popen[bytes]:
        env = killed_at.environment_of_commands(points, self.lab.folder) if points else {}
        return machine.join(self.lab.join_file, "--coordinator", "--etcd", env=env)

    def bring_back(self, machine: Machine) -> None:
        """After the power of the machine was off."""
        if machine is self.lab.first:
            machine.run("up", *machine.location)
        else:
            self.join(machine)

    def await_all(self) -> None:
        """Returns once all hosts are ready, and their members of etcd vote."""
        lab = self.lab
        for name in lab.machines:
            wait_until(lambda name=name: lab.phase(name) == "ready", what=f"host {name}")
        wait_until(lambda: self.lab.votes() == dict.fromkeys(["etcd-0", "etcd-b", "etcd-c"], True),
                   what="the votes of all members")

    # -- who leads, and what is left ---------------------------------------------------------------------------------
    def leader(self) -> Machine | None:
        """The machine of the leading coordinator; None while none leads."""
        with self.lab.etcd() as etcd:
            candidates = sorted(etcd.range(KEYS.leader_prefix())[0], key=lambda kv: kv.create_revision)
        leads = readable_one(candidates[0], Leader) if candidates else None
        return next((m for m in self.lab.machines.values() if leads and f"/{m.address}:" in leads.url), None)

    def bring_to_leader(self) -> Machine:
        """Has the run be where the coordinator leads; returns that machine."""
        leads, holds = wait_until(self.leader, what="a leader"), self.holder()
        if holds is not leads:
            others = [machine.name for machine in self.others(leads)]
            for name in others:
                leads.run("cordon", name, *leads.location)
            leads.run("drain", holds.name, "--within=0", "--wait", *leads.location)
            for name in others:
                leads.run("uncordon", name, *leads.location)
            assert self.holder() is leads
        return leads

    # -- the run -------------------------------------------------------------------------------------------------------
    def holder(self) -> Machine:
        """Where the run is, once it works there."""
        return self.lab.machines[wait_until(lambda: (name := self.lab.holder()) and self.lab.runs_on(name) and name,
                                            what="the run")]

    def moved(self, machine: Machine) -> Machine:
        """Where the run is, once it has left this machine."""
        wait_until(lambda: self.lab.holder() not in ("", machine.name), what=f"the run to leave {machine.name}")
        return self.holder()

    def others(self, machine: Machine) -> list[Machine]:
        return [other for other in self.lab.machines.values() if other is not machine]

    def drivers(self) -> list[Driver]:
        """Those whose writes etcd has taken, in their order. Fails where two have written at a time."""
        with self.lab.etcd() as etcd:
            drivers = [driver for driver, _ in groupby(driver_writes.accepted(etcd, JOB))]
        assert superseded(drivers) == []
        return drivers

    def await_writes(self, machine: Machine) -> Driver:
        """The driver on the machine, once it is the newest one of which etcd has a write."""
        def found() -> Driver | None:
            drivers = self.drivers()
            return drivers[-1] if drivers and drivers[-1].host == machine.name else None
        return wait_until(found, what=f"writes of the driver on {machine.name}")

    def assignment(self) -> tuple[str, int]:
        """Host and generation."""
        with self.lab.etcd() as etcd:
            kv = etcd.get(KEYS.assignment(driver_of(JOB)))
        held = readable_one(kv, Assignment)
        return (held.host, kv.version) if kv is not None and held is not None else ("", 0)


@contextlib.contextmanager
def stopped(found: Sequence[psutil.Process]) -> Iterator[None]:
    """Has these processes hang."""
    assert found
    for process in found:
        process.suspend()
    try:
        yield
    finally:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def traces(machine: Machine) -> dict[str, list[str]]:
    """What the machine has besides processes: mounts, ports on which something listens, memory, and files in /tmp but
    for the cache that torch keeps there."""
    return {"mounts": machine.shell("cat /proc/mounts"), "memory": machine.shell("ls -A /dev/shm"),
            "files": machine.shell("ls -A /tmp -I 'torchinductor_*'"),
            "ports": machine.shell("awk '$4 == \"0A\" {print $2}' /proc/net/tcp /proc/net/tcp6")}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with lab_of("abc", JOB) as lab, pytest.MonkeyPatch.context() as patch:
        made = Hosts(lab)
        made.start()
        put_stub_in_place(lab.folder, patch, behaviour="writes-until-finished")
        lab.first.run("train", "--detach", f"--job={JOB}", *lab.first.location)
        made.await_writes(made.holder())
        yield made


def test_join_that_is_killed_anywhere_ends_with_one_host_and_one_member_when_it_is_repeated(hosts: Hosts) -> None:
    c = hosts.lab.machines["c"]
    assert all(point.reached for point in (*hosts.killed_commands, *hosts.killed_agents))
    with hosts.lab.etcd() as etcd:
        assert sorted(member.name for member in etcd.members()) == ["etcd-0", "etcd-b", "etcd-c"]
        for prefix in (KEYS.hosts_prefix(), KEYS.host_registrations_prefix(), KEYS.host_states_prefix()):
            assert [kv.key.removeprefix(prefix) for kv in etcd.range(prefix)[0]] == ["a", "b", "c"]
        registered = readable_one(etcd.get(KEYS.host("c")), Host)
    assert registered is not None and registered.incarnation == stored_incarnation(c.cluster.paths.incarnation)
    assert len(c.running("bin/etcd")) == 1 and len(c.running("elastic_rl.coordinator")) == 1
    wait_until(lambda: len(c.running("elastic_rl.host.agent")) == 2, what="the agent and its standby, and no third one")


def test_host_that_is_cut_off_with_leader_member_and_driver_ends_it_before_another_one_begins(hosts: Hosts) -> None:
    lab, cut = hosts.lab, hosts.bring_to_leader()
    old, cfg = hosts.await_writes(cut), cut.cluster.cfg
    lab.watched_from = hosts.others(cut)[0]
    unanswered = driver_writes.tried(cfg, UNANSWERED)
    assert hosts.leader() is cut
    cut.cut()
    wait_until(lambda: driver_writes.tried(cfg, UNANSWERED) > unanswered,
               what="writes that etcd does not answer, of a driver that works")
    wait_until(lambda: lab.phase(cut.name) == "lost", what="the loss of the host")
    assert not cut.running("stub_driver"), "its agent has ended the driver before the host was lost"
    now = hosts.moved(cut)
    new = hosts.await_writes(now)
    assert new.assignment == old.assignment + 1 and hosts.leader() is not cut
    cut.heal()
    hosts.await_all()
    assert hosts.assignment() == (now.name, new.assignment) and not cut.runs()
    assert hosts.drivers()[-1] == new, "it goes on undisturbed"


def test_host_whose_supervisors_hang_comes_back_late_and_ends_the_driver_that_went_on(hosts: Hosts) -> None:
    """Nothing on the host can fence itself: two drivers run, and only what etcd refuses keeps them apart."""
    lab, hung = hosts.lab, hosts.holder()
    old, cfg = hosts.await_writes(hung), hung.cluster.cfg
    lab.watched_from = hosts.others(hung)[0]
    supervisors = hung.running("elastic_rl.host.agent", "run_launcher", "run_service")
    with stopped(supervisors):
        now = hosts.moved(hung)
        new = hosts.await_writes(now)
        refused = driver_writes.tried(cfg, REFUSED)
        wait_until(lambda: driver_writes.tried(cfg, REFUSED) > refused + 2, what="refused writes of the older driver")
        assert len(hung.running("stub_driver")) == len(now.running("stub_driver")) == 1, "two drivers at a time"
        assert new.assignment == old.assignment + 1
    wait_until(lambda: not hung.runs(), what="the end of what the host had")
    hosts.await_all()
    assert hosts.assignment() == (now.name, new.assignment)
    assert hosts.drivers()[-1] == new, "it goes on undisturbed"


@full(proved_in="tests/unit/coordinator/test_cluster_world.py tests/integration/host/test_host_session.py",
      why="the command, the agent and the leader of one drain that are all killed")
def test_drain_whose_command_leader_and_agent_are_killed_ends_when_it_is_repeated(hosts: Hosts) -> None:
    lab, left = hosts.lab, hosts.holder()
    lab.watched_from = beside = hosts.others(left)[0]
    old = hosts.await_writes(left)
    command = beside.start("drain", left.name, "--within=0", "--wait", *beside.location)
    with lab.etcd() as etcd:
        wait_until(lambda: (spec := readable_one(etcd.get(KEYS.host_spec(left.name)), HostSpec)) and spec.drain,
                   what="the drain")
    leads = wait_until(hosts.leader, what="a leader")
    agent = min(left.running("elastic_rl.host.agent"), key=lambda process: process.create_time())
    for process in (command, agent, leads.running("elastic_rl.coordinator")[0]):
        process.kill()
    assert command.wait(PATIENCE_S) == -signal.SIGKILL
    psutil.wait_procs([agent], timeout=PATIENCE_S)
    wait_until(lambda: hosts.leader() not in (None, leads), what="the next leader")
    beside.run("drain", left.name, "--within=0", "--wait", "--timeout=240", *beside.location)
    assert lab.phase(left.name) == "left" and not left.runs()
    now = hosts.moved(left)
    assert hosts.await_writes(now).assignment == old.assignment + 1
    beside.run("uncordon", left.name, *beside.location)
    hosts.await_all()


@full(proved_in="tests/integration/host/test_faults_of_hosts.py tests/integration/host/test_hosts_lost.py",
      why="every host in turn, with and without the driver")
@pytest.mark.timeout(1200)
def test_run_goes_on_whichever_host_is_cut_off_or_loses_its_power(hosts: Hosts) -> None:
    lab = hosts.lab
    for machine in lab.machines.values():
        for power in (False, True):
            lab.watched_from = hosts.others(machine)[0]
            (machine.power_off if power else machine.cut)()
            wait_until(lambda machine=machine: lab.phase(machine.name) == "lost", what=f"the loss of {machine.name}")
            wait_until(lambda machine=machine: lab.holder() not in ("", machine.name), what="the run elsewhere")
            driver = hosts.await_writes(hosts.holder())
            if power:
                machine.power_on()
                hosts.bring_back(machine)
            else:
                machine.heal()
            hosts.await_all()
            assert hosts.drivers()[-1] == driver and not machine.runs()


def test_nothing_is_left_on_any_host_when_the_cluster_is_taken_down(hosts: Hosts) -> None:
    """The last test of the file, after all faults."""
    machines = list(hosts.lab.machines.values())
    for machine in reversed(machines):
        machine.run("down", *machine.location)
    for machine in machines:
        wait_until(lambda machine=machine: len(machine.processes()) <= 2, what=f"the end of what {machine.name} had")
        assert traces(machine) == hosts.before[machine.name]
