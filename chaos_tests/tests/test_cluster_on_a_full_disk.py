"""A cluster on a disk that is full: its etcd and its run end, and what is left says why; with room again it goes on."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.hosts import require_namespaces
from support.own_disk import OwnDisk
from support.waiting import PATIENCE_S, wait_until

from chaos_tests.traffic import driver_writes, light_job
from elastic_rl import config
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import StepMetrics
from elastic_rl.host.agent.status import SILENT_AFTER_S, AgentStatus
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.host.processes import python

pytestmark = pytest.mark.timeout(600)
_DISK = 1 << 30
NO_ROOM = os.strerror(errno.ENOSPC)


class FullDisk:
    """A light job on a cluster of its own, all of whose files are on a disk that the test can fill."""

    def __init__(self, folder: Path) -> None:
        mounted = folder / "runs"
        mounted.mkdir()
        self.cfg = config.parse({"run_dir": str(mounted), "job": "full"})
        self.disk = OwnDisk(mounted, _DISK)
        self.keys, self._options = Keys(self.cfg.job), [f"--run_dir={mounted}", f"--job={self.cfg.job}"]
        self._env = {**os.environ, **driver_writes.environment(folder, [*light_job.COMMAND, "--pause-s", "0.5"])}
        self.etcd: EtcdClient | None = None

    def begin(self) -> None:
        done = self.command("train", "--detach", "--with-cluster", "--keep-up", f"--dcs.arena_bytes={32 << 20}",
                            "--train.steps=1000000")
        assert done.returncode == 0, done.stderr
        info = ClusterInfo.load(self.disk.path(ClusterPaths.of(self.cfg).info))
        assert info is not None
        self.etcd = EtcdClient(info.etcd_endpoints, call_timeout_s=2.0, retry_budget_s=PATIENCE_S)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.disk.inside, *python("elastic_rl.cli.main", *words, *self._options)],
                              capture_output=True, encoding="utf-8", env=self._env, timeout=300)

    def steps(self) -> list[int]:
        assert self.etcd is not None
        return [m.step for m, _ in readable(self.etcd.range(self.keys.steps_prefix())[0], StepMetrics)]

    def has_event(self, kind: str) -> bool:
        assert self.etcd is not None
        return any(event.kind == kind for event in events.recent(self.etcd, self.keys, 500))

    def agent(self) -> AgentStatus:
        """What the agent says."""
        path = self.disk.path(ClusterPaths.of(self.cfg).agent_status)
        return wait_until(lambda: AgentStatus.load(path), what="what the host agent says")

    def processes(self) -> list[psutil.Process]:
        """Those whose command line names the folder of the disk."""
        folder = str(self.cfg.run_dir)
        return [process for process in psutil.process_iter(["cmdline"])
                if folder in " ".join(process.info["cmdline"] or ())]

    def close(self) -> None:
        if self.etcd is not None:
            self.etcd.close()
        try:
            self.disk.free()
            self.command("down")
        finally:
            self.disk.close()


@pytest.fixture
def full_disk() -> Iterator[FullDisk]:
    require_namespaces()
    folder = Path(tempfile.mkdtemp(prefix="erl-full-", dir="/var/tmp"))
    made = FullDisk(folder)
    try:
        made.begin()
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_cluster_says_that_its_disk_is_full_and_goes_on_with_room_again(full_disk: FullDisk) -> None:
    wait_until(lambda: len(full_disk.steps()) > 3, what="steps")
    active, before = full_disk.agent().pid, _last(full_disk)
    full_disk.disk.fill()
    wait_until(lambda: NO_ROOM in full_disk.agent().waiting.get("etcd-0", ""), what="the end of etcd, and why")
    silent_at = full_disk.agent().at + SILENT_AFTER_S
    status = full_disk.command("status")
    assert status.returncode and "etcd-0 has ended and cannot be started" in status.stderr and NO_ROOM in status.stderr
    # The standby would have killed an agent that it has not heard since.
    wait_until(lambda: full_disk.agent().at > silent_at + 10, what="the agent, which goes on saying so")
    assert full_disk.agent().pid == active and psutil.pid_exists(active)
    full_disk.disk.free()
    wait_until(lambda: _last(full_disk) > before + 5, what="further steps")
    steps = full_disk.steps()
    assert steps == [*range(steps[0], steps[-1] + 1)], "each of them once"
    assert full_disk.has_event(event_kinds.ETCD_RESTARTED.name) and full_disk.agent().waiting == {}
    assert full_disk.command("down").returncode == 0
    wait_until(lambda: not full_disk.processes(), what="the end of all processes")


def _last(full_disk: FullDisk) -> int:
    return max(full_disk.steps(), default=0)
