"""Hosts of a cluster that lose their power, or their network, and come back: namespaces of this machine, real etcd,
coordinator, agents and DCS nodes, and a stub in the place of a run's driver."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.hosts import IsolatedHost, TwoNetworks
from support.stub_run import put_stub_in_place
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.coordinator.client.admin_client import AdminClient, RequestRefused
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.cluster_records import RunStatus
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.host import processes
from elastic_rl.host.local_cluster import Cluster

JOB = f"j-{secrets.token_hex(3)}"
_SETTINGS = ("--coordinator.replicas=1", "--dcs.arena_bytes=33554432")


class Machine:
    """A machine of the cluster, with a folder of its own that the test can read."""

    def __init__(self, network: TwoNetworks, folder: Path, name: str) -> None:
        self.name, self._network = name, network
        self._host = network.host(name)
        self.address = self._host.address_to_etcd
        self.folder = folder / name
        self.location = ["--cluster=lab", f"--run_dir={self.folder}"]
        self._space = IsolatedHost(self._host)
        self._commands: list[subprocess.Popen[bytes]] = []

    def run(self, *arguments: str, env: Mapping[str, str] = {}) -> str:
        """What a command of `elastic-rl` on the machine has printed."""
        done = subprocess.run([*self._space.inside, *processes.python("elastic_rl.cli.main", *arguments)],
                              env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
        assert not done.returncode, (arguments, done.stdout, done.stderr)
        return done.stdout

    def join(self, file: Path) -> None:
        """Starts `elastic-rl node` there."""
        with (self.folder.parent / f"{self.name}.log").open("ab") as log:
            self._commands.append(subprocess.Popen(
                [*self._space.inside, *processes.python(
                    "elastic_rl.cli.main", "node", f"--join={file}", f"--name={self.name}",
                    f"--address={self.address}", f"--run_dir={self.folder}")], stdout=log, stderr=log))

    def runs(self) -> list[psutil.Process]:
        """Processes of runs there, the stubs of their drivers included."""
        return [p for p in self._space.processes() if any(
            name in part for name in ("run_launcher", "run_service", "stub_driver") for part in _command_line(p))]

    def power_off(self) -> None:
        self._space.power_off()
        for command in self._commands:
            command.wait()
        self._commands.clear()

    def power_on(self) -> None:
        self._space = IsolatedHost(self._host)

    def cut(self) -> None:
        self._network.cut_from_etcd(self.name)

    def heal(self) -> None:
        self._network.heal(self.name)

    @property
    def cluster(self) -> Cluster:
        return Cluster(config.parse({"run_dir": str(self.folder), "cluster": "lab", "job": JOB}))


def _command_line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


class Lab:
    """Three machines: ``a`` has etcd and the coordinator, ``b`` and ``c`` have joined."""

    def __init__(self, network: TwoNetworks, folder: Path) -> None:
        self.a, self.b, self.c = (Machine(network, folder, name) for name in "abc")
        self.all = (self.a, self.b, self.c)
        self.a.run("up", *self.a.location, *_SETTINGS, f"--address={self.a.address}", "--name=a")
        for machine in (self.b, self.c):
            machine.join(self.join_file)

    @property
    def join_file(self) -> Path:
        return self.a.cluster.paths.join_file

    def api(self) -> AdminClient:
        return AdminClient(self.a.cluster.connect(), retry_budget_s=1.0)

    def hosts(self) -> dict[str, dict[str, Any]]:
        with contextlib.suppress(EtcdUnavailable, RequestRefused):
            return {host["id"]: host for host in self.api().hosts()}
        return {}

    def phase(self, host: str) -> str:
        return str(self.hosts().get(host, {}).get("phase", ""))

    def holder(self) -> str:
        return next((name for name, host in self.hosts().items() if host["assignments"]), "")

    def generation(self) -> int:
        return next((held["generation"] for host in self.hosts().values() for held in host["assignments"].values()), 0)

    def runs_on(self, host: str) -> bool:
        """Whether the run is assigned to the host, and its agent says that it runs."""
        found = self.hosts().get(host, {})
        return any(found["services"].get(name, {}).get("state") == "running"
                   and found["services"][name]["generation"] == held["generation"]
                   for name, held in found.get("assignments", {}).items())

    def nodes(self) -> set[str]:
        prefix = Keys(JOB).dcs_nodes_prefix()
        cluster = self.a.cluster
        with cluster.etcd(cluster.connect()) as etcd:
            return {kv.key.removeprefix(prefix) for kv in etcd.range(prefix)[0]}

    def status(self) -> RunStatus | None:
        cluster = self.a.cluster
        with cluster.etcd(cluster.connect()) as etcd:
            return readable_one(etcd.get(ClusterKeys("lab").run_status(JOB)), RunStatus)


@pytest.fixture
def lab() -> Iterator[Lab]:
    folder = Path(tempfile.mkdtemp(prefix="erl-hosts-", dir="/var/tmp"))  # each machine has a /tmp of its own
    try:
        with TwoNetworks() as network, contextlib.ExitStack() as off:
            made = Lab.__new__(Lab)
            off.callback(lambda: [machine.power_off() for machine in getattr(made, "all", ())])
            made.__init__(network, folder)  # type: ignore[misc]
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_run_goes_on_elsewhere_when_its_host_loses_power_or_network(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    for host in "abc":
        wait_until(lambda host=host: lab.phase(host) == "ready", what=f"host {host}")
    put_stub_in_place(lab.a.folder.parent, monkeypatch)
    lab.a.run("train", "--detach", f"--job={JOB}", *lab.a.location, *_SETTINGS)
    wait_until(lambda: lab.runs_on("a"), what="the run on the host that it was submitted on")
    wait_until(lambda: lab.nodes() == {"node-0", "node-b", "node-c"}, what="a DCS node on each host")
    lab.a.run("drain", "a", "--within=0", "--wait", *lab.a.location)
    wait_until(lambda: lab.runs_on("b"), what="the run on b")
    assert lab.b.runs() and not lab.c.runs()
    wait_until(lambda: not lab.a.runs(), what="the end of the run on a")
    generation = lab.generation()

    # b loses its power.
    lab.b.power_off()
    wait_until(lambda: lab.runs_on("c"), what="the run on c")
    assert lab.phase("b") == "lost" and lab.generation() == generation + 1
    wait_until(lambda: lab.nodes() == {"node-0", "node-c"}, what="the end of its node's lease")

    # c is cut off: it ends the run by itself, before another host has it, and keeps its DCS node.
    lab.a.run("uncordon", "a", *lab.a.location)
    wait_until(lambda: lab.phase("a") == "ready", what="host a")
    lab.c.cut()
    wait_until(lambda: lab.phase("c") == "lost", what="the loss of c")
    assert not lab.c.runs(), "its agent has ended the run before the host was lost"
    wait_until(lambda: lab.runs_on("a"), what="the run on a")
    assert lab.c.cluster.services.get(lab.c.cluster.node) is not None

    # Both come back: they hold nothing, and are fit.
    lab.c.heal()
    lab.b.power_on()
    lab.b.join(lab.join_file)
    for host in "bc":
        wait_until(lambda host=host: lab.phase(host) == "ready", what=f"the return of {host}")
    wait_until(lambda: lab.nodes() == {"node-0", "node-b", "node-c"}, what="a DCS node on each host")
    assert lab.holder() == "a" and lab.runs_on("a") and not lab.b.runs() and not lab.c.runs()
    status = lab.status()
    assert status is not None and status.phase == "running" and status.submission == 1
