"""Samples of what a run takes and keeps: its processes, its keys in etcd, its files, the time of ``status``."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.host import processes
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.host.processes import OWNER_ENV

_SHARED_MEMORY = Path("/dev/shm")
_MODULES = {"elastic_rl.host.agent": "host-agent", "elastic_rl.coordinator.service": "coordinator",
            "elastic_rl.dcs.node.service": "dcs-node", "elastic_rl.driver": "driver",
            "elastic_rl.run_launcher": "run", "elastic_rl.run_service": "run",
            "elastic_rl.trainer.group.agent": "trainer-agent", "elastic_rl.engine.sglang.launch": "engine-server",
            "elastic_rl.engine.sglang.launch_router": "router",
            "elastic_rl.coordinator.alerts.sender_process": "alert-sender", "ray.util.client.server": "ray-client"}


def role_of(command: Sequence[str], ancestors: Sequence[Sequence[str]] = ()) -> str:
    """What a process is in the cluster, the same over its restarts, by its command line and those of its ancestors, the
    nearest first. Pure."""
    if not command:
        return "unknown"
    line, program = " ".join(command), command[0]
    if "multiprocessing" in line:
        parent = ancestors[0] if ancestors else ()
        if "resource_tracker" in line:
            return f"{role_of(parent, ancestors[1:])}/resource-tracker"
        if "forkserver" in line:
            if "forkserver" in " ".join(parent):
                return "rank"
            return f"{role_of(parent, ancestors[1:])}/forkserver"
        return f"{role_of(parent, ancestors[1:])}/child"
    if "::" in program or "::" in line.split()[0]:
        return _titled(line.split()[0], ancestors)
    if "-m" in command[:-1]:
        module = command[list(command).index("-m") + 1]
        return _MODULES.get(module, module)
    name = Path(program).name
    if "raylet" in name or "gcs_server" in name:
        return f"ray/{name}{_side(command, ancestors)}"
    if name.startswith("python"):
        script = next((Path(a).name for a in command[1:] if "/" in a), name)
        return f"ray/{script}{_side(command, ancestors)}" if "ray" in line else script
    return name


def _titled(title: str, ancestors: Sequence[Sequence[str]]) -> str:
    """What a process is that has given itself a title (Ray, SGLang), without what it is just doing."""
    owner, _, what = title.partition("::")
    if owner == "ray":
        found = re.match(r"(ServeReplica:[^:.]+|[A-Za-z]+)", what)
        return f"ray::{found.group(1)}" if found else title
    return f"{owner}::{what}"


def _side(command: Sequence[str], ancestors: Sequence[Sequence[str]]) -> str:
    """Which of the two Rays of a host a process belongs to."""
    lines = [" ".join(line) for line in (command, *ancestors)]
    start = next((line for line in lines if " start " in line), "")
    return "/head" if "--head" in start else "/worker" if start else ""


@dataclass(frozen=True)
class Sampler:
    """Takes samples of a job on a cluster on this host."""

    cluster: Cluster
    etcd: EtcdClient
    api: AdminClient

    @property
    def paths(self) -> JobPaths:
        return JobPaths.of(self.cluster.cfg)

    def processes(self) -> Iterator[dict[str, Any]]:
        """The fields of a record of each process of the cluster and of the job."""
        found = {p.pid: p for p in (*processes.marked(str(self.paths.private)),
                                    *processes.marked(str(self.cluster.dir), OWNER_ENV))}
        for process in found.values():
            with contextlib.suppress(psutil.Error, OSError):
                yield _of_process(process)

    def store(self) -> dict[str, Any]:
        """The fields of a record of what is kept. Raises ElasticRLError."""
        began = time.monotonic()
        status = self.api.get("")
        status_s = time.monotonic() - began
        keys, cluster_keys = Keys(self.cluster.cfg.job), ClusterKeys(self.cluster.cfg.cluster_name)
        by_prefix = Counter[str]()
        for root in (keys.root, cluster_keys.root):
            by_prefix.update(prefix_of(key, root) for key in self.etcd.keys(root))
        files, folder = _files(self.paths.folder), self.paths.folder
        history = _bytes_of(files, self.paths.steps, self.paths.disk)
        logs = _bytes_of(files, self.paths.logs, ClusterPaths.of(self.cluster.cfg).etcd)
        tag = self.paths.file_tag()
        shared = {p: n for p, n in _files(_SHARED_MEMORY).items() if tag in str(p) or self.cluster.cfg.job in str(p)}
        return {
            "etcd_keys": by_prefix.total(), "etcd_keys_by_prefix": dict(sorted(by_prefix.items())),
            "etcd_bytes": max((member.db_in_use_bytes for member in self.etcd.statuses()), default=0),
            "files": len(files), "file_bytes": sum(files.values()) - history - logs, "history_bytes": history,
            "log_bytes": logs, "file_bytes_by_folder": _by_folder(files, folder),
            "shm_files": len(shared), "shm_bytes": sum(shared.values()), "status_s": round(status_s, 4),
            "step": int((status.get("job") or status.get("status") or {}).get("step") or 0)}


def prefix_of(key: str, root: str) -> str:
    """The kind of a key: its first two parts below ``root`` that name no single thing. Pure."""
    parts = key.removeprefix(root).strip("/").split("/")
    return "/".join(parts[:-1][:2]) or parts[0]


def _of_process(process: psutil.Process) -> dict[str, Any]:
    ancestors = [parent.cmdline() for parent in process.parents()[:3]]
    with process.oneshot():
        times, command = process.cpu_times(), process.cmdline()
        return {"role": role_of(command, ancestors), "pid": process.pid, "rss_bytes": process.memory_info().rss,
                "anonymous_bytes": anonymous_bytes(process.pid), "descriptors": process.num_fds(),
                "threads": process.num_threads(), "cpu_s": round(times.user + times.system, 2)}


def anonymous_bytes(pid: int) -> int:
    """Memory that a process has for itself, not mapped of a file: pages that it shares with the process that forked it
    count, so that it does not seem to grow as the two stop sharing them. Raises OSError."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii", errors="replace")
    return sum(int(kib) for kib in re.findall(r"^(?:Anonymous|Swap):\s+(\d+) kB", text, re.MULTILINE)) << 10


def _files(folder: Path) -> dict[Path, int]:
    """The files below a folder, which come and go, with their bytes."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found[Path(parent) / name] = (Path(parent) / name).lstat().st_size
    return found


def _bytes_of(files: Mapping[Path, int], *of: Path) -> int:
    """Bytes of these files, and of the files in these folders."""
    return sum(nbytes for path, nbytes in files.items() if not {path, *path.parents}.isdisjoint(of))


def _by_folder(files: dict[Path, int], root: Path) -> dict[str, int]:
    """Bytes by the first two folders below ``root``."""
    found = Counter[str]()
    for path, nbytes in files.items():
        found["/".join(path.relative_to(root).parts[:-1][:2]) or "."] += nbytes
    return dict(sorted(found.items()))
