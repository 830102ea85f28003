"""A cluster of machines: namespaces of this one, each with a folder of its own that the test can read."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from elastic_rl import config
from elastic_rl.coordinator.client.admin_client import AdminClient, RequestRefused
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import RunStatus
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.host import processes
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.test_hosts.cluster_hosts import ClusterHosts
from elastic_rl.host.test_hosts.isolated_hosts import IsolatedHosts
from support.hosts import IsolatedHost, isolated_hosts, require_namespaces


class Machine:
    """A machine of the cluster, with a folder of its own that the test can read."""

    def __init__(self, host: IsolatedHost, folder: Path, job: str) -> None:
        self.name, self.address, self.folder, self._host, self._job = host.name, host.address, folder, host, job
        self.location = ["--cluster=lab", f"--run_dir={self.folder}"]
        self._commands: list[subprocess.Popen[bytes]] = []

    def run(self, *arguments: str, env: Mapping[str, str] = {}) -> str:
        """What a command of `elastic-rl` on the machine has printed."""
        done = subprocess.run([*self._host.inside, *processes.python("elastic_rl.cli.main", *arguments)],
                              env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
        assert not done.returncode, (arguments, done.stdout, done.stderr)
        return done.stdout

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts a command of `elastic-rl` on the machine, which says nothing."""
        self._commands.append(subprocess.Popen(
            [*self._host.inside, *processes.python("elastic_rl.cli.main", *arguments)], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL))
        return self._commands[-1]

    def shell(self, script: str) -> list[str]:
        """The lines that a script of the shell on the machine prints."""
        return subprocess.run([*self._host.inside, "sh", "-c", script], check=True, capture_output=True, text=True,
                              timeout=60).stdout.splitlines()

    def join(self, file: Path, *options: str, env: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
        """Starts `elastic-rl node` there."""
        with (self.folder.parent / f"{self.name}.log").open("ab") as log:
            self._commands.append(subprocess.Popen(
                [*self._host.inside, *processes.python(
                    "elastic_rl.cli.main", "node", f"--join={file}", f"--name={self.name}",
                    f"--address={self.address}", f"--run_dir={self.folder}", *options)], env={**os.environ, **env},
                stdout=log, stderr=log))
        return self._commands[-1]

    def runs(self) -> list[psutil.Process]:
        """Processes of runs there, the stubs of their drivers included."""
        return self.running("run_launcher", "run_service", "stub_driver")

    def computes(self) -> list[psutil.Process]:
        """Processes there of Ray, engines and ranks."""
        return self.running("raylet", "gcs_server", "ray::", "elastic_rl.engine", "torchrun")

    def running(self, *names: str) -> list[psutil.Process]:
        """The processes there with one of the names in their command line."""
        return [p for p in self._host.processes() if any(
            name in part for name in names for part in _command_line(p))]

    def lose_sight_of(self, other: Machine) -> None:
        """From here on this machine has nothing of the other one's folder, as where nothing is shared, until it is
        switched off."""
        subprocess.run([*self._host.inside, "mount", "-t", "tmpfs", "tmpfs", str(other.folder)], check=True)

    def processes(self) -> list[psutil.Process]:
        return self._host.processes()

    def path(self, path: str) -> Path:
        """A path of the machine that is not in its folder, such as in its /tmp; while the machine is on."""
        return Path(f"/proc/{self.processes()[0].pid}/root{path}")

    def power_off(self) -> None:
        self._host.power_off()
        for command in self._commands:
            command.wait()
        self._commands.clear()

    def power_on(self) -> None:
        self._host.power_on()

    def cut(self) -> None:
        self._host.cut()

    def heal(self) -> None:
        self._host.heal()

    @property
    def cluster(self) -> Cluster:
        return Cluster(config.parse({"run_dir": str(self.folder), "cluster": "lab", "job": self._job}))


def _command_line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


class Lab:
    """Machines of a cluster, of which the first has etcd and the coordinators, and the others join; and a job on it."""

    def __init__(self, hosts: IsolatedHosts, folder: Path, folders: Mapping[str, Path], job: str) -> None:
        """``folders``: of each machine, by its name."""
        self.job, self.folder = job, folder
        self.address_beside = hosts.bridge.subnet.of_machine
        """An address that the machines reach, on none of them."""
        self.machines = {name: Machine(IsolatedHost(hosts, name), own, job) for name, own in folders.items()}
        self.first = next(iter(self.machines.values()))
        self.watched_from = self.first
        """The machine whose files say where the coordinators are."""

    def start(self, *settings: str, joining: Sequence[str] = ()) -> None:
        """``joining``: options of `elastic-rl node` on the machines that join."""
        first = self.first
        first.run("up", *first.location, *settings, f"--address={first.address}", f"--name={first.name}")
        for machine in self.machines.values():
            if machine is not first:
                machine.join(self.join_file, *joining)

    @property
    def join_file(self) -> Path:
        return self.first.cluster.paths.join_file

    def api(self) -> AdminClient:
        return AdminClient(self.watched_from.cluster.connect(), retry_budget_s=1.0)

    def etcd(self) -> EtcdClient:
        return self.watched_from.cluster.etcd(self.watched_from.cluster.connect())

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

    def votes(self) -> dict[str, bool]:
        """The members of etcd that have started, and whether each has a vote."""
        with self.etcd() as etcd:
            return {member.name: not member.is_learner for member in etcd.members() if member.name}

    def nodes(self) -> set[str]:
        prefix = Keys(self.job).dcs_nodes_prefix()
        with self.etcd() as etcd:
            return {kv.key.removeprefix(prefix) for kv in etcd.range(prefix)[0]}

    def status(self) -> RunStatus | None:
        with self.etcd() as etcd:
            return readable_one(etcd.get(ClusterKeys("lab").run_status(self.job)), RunStatus)


@contextlib.contextmanager
def lab_folder() -> Iterator[Path]:
    """A folder that all machines see, each of which has a /tmp of its own."""
    folder = Path(tempfile.mkdtemp(prefix="erl-hosts-", dir="/var/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def lab_of(names: Sequence[str], job: str) -> Iterator[Lab]:
    """Machines that are off at the end, whatever happens. Skips the test where none can be made."""
    with lab_folder() as folder, isolated_hosts(names, folder) as hosts:
        lab = Lab(hosts, folder, {name: folder / name for name in names}, job)
        try:
            yield lab
        finally:
            for machine in lab.machines.values():
                machine.power_off()


class LabHere(Lab):
    """The hosts that `elastic-rl up --hosts` has made, of which the first sees the folders of all, and the others
    their own."""

    def __init__(self, hosts: ClusterHosts, folder: Path, job: str) -> None:
        super().__init__(hosts.isolated, folder, {host.name: host.run_dir for host in hosts.all()}, job)

    def beside(self, *command: str) -> str:
        """What a command of `elastic-rl` has printed that was run on none of the hosts."""
        return _beside(*command, *self.first.location)


def _beside(*command: str) -> str:
    done = subprocess.run(processes.python("elastic_rl.cli.main", *command), capture_output=True, text=True,
                          timeout=300)
    assert not done.returncode, (command, done.stdout, done.stderr)
    return done.stdout


@contextlib.contextmanager
def lab_here(count: int, job: str, *settings: str) -> Iterator[LabHere]:
    """So many hosts, by `elastic-rl up --hosts`, which are off at the end, whatever happens. Skips the test where none
    can be made."""
    require_namespaces()
    with lab_folder() as folder:
        where = config.parse({"run_dir": str(folder / "runs"), "cluster": "lab"})
        hosts = ClusterHosts(Cluster(where), print)
        try:
            _beside("up", f"--hosts={count}", "--cluster=lab", f"--run_dir={where.run_dir}", *settings)
            yield LabHere(hosts, folder, job)
        finally:
            for host in hosts.all() if hosts.record is not None else ():
                hosts.power_off(host.name)  # which takes less time than to take it down in order
            hosts.down()
