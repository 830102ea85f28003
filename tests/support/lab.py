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
from support.hosts import IsolatedHost, TwoNetworks


class Machine:
    """A machine of the cluster, with a folder of its own that the test can read."""

    def __init__(self, network: TwoNetworks, folder: Path, name: str, job: str) -> None:
        self.name, self._network, self._job = name, network, job
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

    def join(self, file: Path, *options: str) -> None:
        """Starts `elastic-rl node` there."""
        with (self.folder.parent / f"{self.name}.log").open("ab") as log:
            self._commands.append(subprocess.Popen(
                [*self._space.inside, *processes.python(
                    "elastic_rl.cli.main", "node", f"--join={file}", f"--name={self.name}",
                    f"--address={self.address}", f"--run_dir={self.folder}", *options)], stdout=log, stderr=log))

    def runs(self) -> list[psutil.Process]:
        """Processes of runs there, the stubs of their drivers included."""
        return self._with("run_launcher", "run_service", "stub_driver")

    def computes(self) -> list[psutil.Process]:
        """Processes there of Ray, engines and ranks."""
        return self._with("raylet", "gcs_server", "ray::", "elastic_rl.engine", "torchrun")

    def _with(self, *names: str) -> list[psutil.Process]:
        """Those there with one of the names in their command line."""
        return [p for p in self._space.processes() if any(
            name in part for name in names for part in _command_line(p))]

    def lose_sight_of(self, other: Machine) -> None:
        """From here on this machine has nothing of the other one's folder, as where nothing is shared, until it is
        switched off."""
        subprocess.run([*self._space.inside, "mount", "-t", "tmpfs", "tmpfs", str(other.folder)], check=True)

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
        return Cluster(config.parse({"run_dir": str(self.folder), "cluster": "lab", "job": self._job}))


def _command_line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


class Lab:
    """Machines of a cluster, of which the first has etcd and the coordinators, and the others join; and a job on it."""

    def __init__(self, network: TwoNetworks, folder: Path, names: Sequence[str], job: str) -> None:
        self.job, self.folder, self.network = job, folder, network
        self.machines = {name: Machine(network, folder, name, job) for name in names}
        self.first = self.machines[names[0]]
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
        return self.first.cluster.etcd(self.first.cluster.connect())

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
        prefix = Keys(self.job).dcs_nodes_prefix()
        with self.etcd() as etcd:
            return {kv.key.removeprefix(prefix) for kv in etcd.range(prefix)[0]}

    def status(self) -> RunStatus | None:
        with self.etcd() as etcd:
            return readable_one(etcd.get(ClusterKeys("lab").run_status(self.job)), RunStatus)


@contextlib.contextmanager
def lab_of(names: Sequence[str], job: str) -> Iterator[Lab]:
    """Machines that are off at the end, whatever happens. Skips the test where none can be made."""
    folder = Path(tempfile.mkdtemp(prefix="erl-hosts-", dir="/var/tmp"))  # each machine has a /tmp of its own
    try:
        with TwoNetworks() as network:
            lab = Lab(network, folder, names, job)
            try:
                yield lab
            finally:
                for machine in lab.machines.values():
                    machine.power_off()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
