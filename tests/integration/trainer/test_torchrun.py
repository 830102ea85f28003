"""A training job of a user's own under ``torchrun``, with the rendezvous in etcd: the machine of one agent dies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl.etcd.keys import Keys

EXAMPLE = Path(__file__).parents[3] / "examples" / "torchrun_ddp.py"
STEPS = 6000


class Machines:
    """Agents of one job, each with its rank."""

    def __init__(self, endpoint: str, prefix: str, folder: Path) -> None:
        self.state_file = folder / "state.pt"
        self._command = [
            str(Path(sys.executable).with_name("torchrun")), "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=10",
            "--rdzv-backend=elastic-rl-etcd3", f"--rdzv-endpoint={endpoint}", "--rdzv-id=r", "--local-addr=127.0.0.1",
            f"--rdzv-conf=prefix={prefix},last_call_timeout=2", str(EXAMPLE), str(self.state_file), str(STEPS)]
        self.logs: list[Path] = []
        self.agents: list[subprocess.Popen[bytes]] = []
        self._folder = folder

    def start(self) -> None:
        self.logs.append(self._folder / f"agent-{len(self.agents)}.log")
        with self.logs[-1].open("wb") as log:
            self.agents.append(subprocess.Popen(
                self._command, stdout=log, stderr=log,
                env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}))

    def power_off(self, number: int) -> None:
        agent = self.agents[number]
        for process in (*psutil.Process(agent.pid).children(recursive=True), agent):  # ranks have sessions of their own
            process.kill()
        agent.wait()

    def step(self) -> int:
        return int(torch.load(self.state_file, weights_only=True)["step"]) if self.state_file.exists() else 0


@pytest.fixture
def machines(etcd_servers: EtcdServers, keys: Keys, tmp_path: Path) -> Iterator[Machines]:
    made = Machines(etcd_servers.endpoints[0], f"/{keys.job}/", tmp_path)
    try:
        yield made
    finally:
        for number, agent in enumerate(made.agents):
            if agent.poll() is None:
                made.power_off(number)


def test_job_goes_on_with_the_agents_that_are_left_and_from_where_it_was(machines: Machines) -> None:
    machines.start()
    machines.start()
    wait_until(lambda: machines.step() > 20 and any("of 2 begins" in log.read_text() for log in machines.logs),
               what="steps of two ranks")
    machines.power_off(0)
    reached = machines.step()
    assert reached < STEPS
    assert machines.agents[1].wait(600) == 0
    state = torch.load(machines.state_file, weights_only=True)
    assert state["step"] == STEPS
    lines = machines.logs[1].read_text().splitlines()
    begun = [int(line.rpartition(" ")[2]) for line in lines if "begins with" in line]
    assert begun[-1] >= reached > 0
    torch.testing.assert_close(state["model"]["weight"], torch.ones(1, 4), rtol=1e-3, atol=1e-3)
