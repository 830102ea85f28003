"""Starting real DCS nodes."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode
from elastic_rl.host.processes import stop
from support.etcd_server import EtcdServers
from support.forked import spawn
from support.waiting import wait_until


def spawn_node(etcd_servers: Sequence[str], keys: Keys, node_id: str, folder: Path,
               **dcs: object) -> subprocess.Popen[bytes]:
    """A node process with ``dcs`` settings; its log, and its files, below ``folder``. The caller stops it.

    Without other settings it keeps chunks in memory only, so that a test knows where each one is, and verifies a chunk
    each time it hands it out, so that damage shows at once.
    """
    settings = {"arena_bytes": 32 << 20, "disk_dir": folder / "disk", "disk_bytes": 0, "verify_every_s": 0, **dcs}
    return spawn(
        "elastic_rl.dcs.node.service", "--etcd", ",".join(etcd_servers), "--id", node_id, "--no-token",
        f"--job={keys.job}",
        # Longer limits than in production: tests share their cores with much else, and a node that gets no time for a
        # while is not what they are about.
        f"--run_dir={folder / 'runs'}", "--coordinator.lease_ttl_s=10",
        "--etcd.call_timeout_s=2", *(f"--dcs.{key}={value}" for key, value in settings.items()),
        log=folder / f"{node_id}.log")


def await_node(etcd: EtcdClient, keys: Keys, process: subprocess.Popen[bytes]) -> DcsNode:
    """The node's record, once it has registered."""
    def registered() -> DcsNode | None:
        records = (DcsNode.decode(kv.value) for kv in etcd.range(keys.dcs_nodes_prefix())[0])
        return next((r for r in records if r.pid == process.pid), None)

    return wait_until(registered, what="the DCS node", alive=lambda: process.poll() is None)


@dataclass(kw_only=True)
class Nodes:
    """The node processes of one job; what tests do with them is in classes of their own."""

    etcd_servers: EtcdServers
    etcd: EtcdClient
    keys: Keys
    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def launch(self, node: str, **dcs: object) -> subprocess.Popen[bytes]:
        """Does not wait until it has registered."""
        process = self.processes[node] = spawn_node(self.etcd_servers.endpoints, self.keys, node, self.folder, **dcs)
        return process

    def start_node(self, node: str, **dcs: object) -> DcsNode:
        return await_node(self.etcd, self.keys, self.launch(node, **dcs))

    def kill(self, node: str) -> None:
        self.processes[node].kill()
        assert self.processes[node].wait(timeout=60) == -signal.SIGKILL

    def close(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            stop(process.pid)
            process.wait(timeout=60)
