"""A cluster in the foreground, as Slurm runs it: its end suspends it, and the next start resumes its run.

The batch script and elastic-rl are real, srun and the addresses of the nodes are not: both hosts are folders of one
machine, at one address."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import run_in_one_line as _run
from support.launchers import OPS
from support.stub_run import put_stub_in_place
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.etcd.cluster_records import JobPhase
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.net.addresses import LOOPBACK, reachable_address

ADDRESS = reachable_address("0.0.0.0")
pytestmark = pytest.mark.skipif(ADDRESS == LOOPBACK, reason="this machine has no address but loopback")
JOB = f"j-{secrets.token_hex(3)}"
STUBS = {
    "elastic-rl": f'#!/bin/sh\nexec {sys.executable} -m elastic_rl.cli.main "$@"\n',
    "getent": f"#!/bin/sh\necho {ADDRESS} STREAM\n",
    "srun": '#!/usr/bin/env bash\nSLURM_PROCID=0 exec "${@: -1}"\n',
    "scontrol": "#!/bin/sh\n",
    "squeue": "#!/bin/sh\necho RUNNING\n",
}


class Allocation:
    """Two nodes of Slurm, in which the batch script runs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._log = folder, folder / "slurm.log"
        for name, text in STUBS.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.first, self.second = (Cluster(config.parse({
            "run_dir": str(folder / "runs" / name), "cluster": "lab", "job": JOB,
            "coordinator": {"replicas": 1}, "dcs": {"arena_bytes": 32 << 20}})) for name in ("host-0", "host-1"))
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PATH": f"{self._folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(self._folder),
               "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "ERL_PROGRAM": str(self._folder / "elastic-rl"),
               "ERL_UP": "--coordinator.replicas=1"}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(["bash", OPS / "slurm" / "elastic-rl.sbatch"], stdout=log, stderr=log,
                                            env=env)
        return self.process

    @property
    def said(self) -> str:
        return self._log.read_text()

    def await_hosts(self, times: int) -> None:
        for name in ("host-0", "host-1"):
            wait_until(lambda name=name: self.said.count(f"host {name}: ready") >= times, what=f"{name} to be ready")

    def is_gone(self) -> bool:
        return not any(files.running() for cluster in (self.first, self.second)
                       for files in (cluster.services, cluster.agents, cluster.singletons))


@pytest.fixture
def allocation(tmp_path: Path) -> Iterator[Allocation]:
    made = Allocation(tmp_path)
    yield made
    for cluster in (made.second, made.first):
        cluster.down()
    made.process.terminate()
    made.process.wait(60)


def test_run_is_resumed_by_the_next_allocation_unless_the_cluster_is_taken_down(
        allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
        ) -> None:
    first = allocation.first
    put_stub_in_place(tmp_path, monkeypatch)
    allocation.await_hosts(1)
    first.admit()
    options = [f"--job={JOB}", "--cluster=lab", f"--run_dir={first.cfg.run_dir}"]
    assert _run(capsys, "train", "--detach", *options)[0] == Exit.OK
    wait_until(lambda: first.run.look().phase is JobPhase.RUNNING, what="the run")

    # The signal of the time limit: all of it ends, and the run is not stopped.
    allocation.process.send_signal(signal.SIGTERM)
    assert allocation.process.wait(150) == 143, allocation.said
    assert allocation.is_gone() and first.suspended and not first.stops_runs
    assert first.run.look().phase is JobPhase.RUNNING, "as after a reboot"

    # The job is requeued: the run goes on, by itself.
    allocation.start()
    allocation.await_hosts(2)
    wait_until(lambda: bool(first.run.pid) and first.run.look().phase is JobPhase.RUNNING, what="the run to go on")
    assert not first.suspended and not first.paths.suspended.exists()

    # Another command for the foreground is refused, and changes nothing.
    code, said = _run(capsys, "up", "--foreground", *options[1:])
    assert code == Exit.USAGE and "keeps cluster lab in its foreground, process " in said
    assert not first.taken_down and first.run.pid

    # A cluster that is taken down by another command ends the one in the foreground.
    first.suspend()  # as the command does it; `down` of a cluster that is suspended stops its runs for good
    assert allocation.process.wait(150) == 0 and "the cluster was taken down" in allocation.said
    assert first.suspended
    assert _run(capsys, "down", *options[1:])[0] == Exit.OK
    assert first.stops_runs
    first.up()
    reading = first.run.read()
    assert reading.phase is JobPhase.STOPPED and not reading.wanted, "nothing is started for a commit"
    wait_until(lambda: not first.run.pid, what="the end of the process that its old assignment may have started")
