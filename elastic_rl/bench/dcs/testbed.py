"""What the rows share: an etcd and folders, nodes, publishers and pullers, and the end of them all."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psutil

from elastic_rl.bench.etcd import end, start_etcd
from elastic_rl.bench.options import Options, Unmeasurable
from elastic_rl.bench.workers import Worker, last_line
from elastic_rl.config import DcsConfig
from elastic_rl.dcs.catalog.garbage_collector import GarbageCollector
from elastic_rl.dcs.catalog.retention import RetentionPolicy
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.errors import DeadlineExceeded
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode
from elastic_rl.host.processes import python, spawn
from elastic_rl.runtime.waiting import wait_until

SHM = Path("/dev/shm")
STREAM = "policy"
DCS = DcsConfig()
_SPARE_BYTES = 64 << 20
"""Bytes of an arena or disk beyond the versions that it holds: manifests, alignment, files."""
_SPARE_RAM = 1 << 30
_START_S, _SAVE_S = 60.0, 120.0
FOLDER_PREFIX = "erl-bench-"
"""Prefix of folders; the id of the process that they belong to follows."""


def require_ram(nbytes: int) -> None:
    """Raises Unmeasurable when so much would leave the machine short of memory."""
    free, needed = psutil.virtual_memory().available, nbytes + _SPARE_RAM
    if free < needed:
        raise Unmeasurable(f"{free >> 20} MiB of memory are free of the {needed >> 20} MiB that this takes")


def require_memory(folder: Path, nbytes: int) -> None:
    """Raises Unmeasurable when the folder's file system has less free space."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise Unmeasurable(f"{folder} has {free >> 20} MiB free of the {nbytes >> 20} MiB that this takes")


def remove_leftovers() -> None:
    """Removes the folders of killed runs."""
    for path in [*SHM.glob(f"{FOLDER_PREFIX}*"), *Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*")]:
        pid = path.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


class Cluster:
    """A job of its own in the testbed's etcd. Nodes have the default settings, but for their capacity: arena and disk
    hold the versions of the row. So they encode deltas where that pays, and save versions to disk."""

    def __init__(self, testbed: Testbed, stack: contextlib.ExitStack) -> None:
        self.testbed = testbed
        self.keys = Keys(f"bench-{secrets.token_hex(4)}")
        self.etcd = testbed.etcd
        self.epoch = fencing.raise_epoch(self.etcd, self.keys, "bench").number
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = stack
        self._names = itertools.count(1)
        self._client: DcsClient | None = None

    def start(self, node_id: str, versions_bytes: int, **dcs: object) -> subprocess.Popen[bytes]:
        """A node whose arena and disk hold so many bytes; ``await_nodes`` waits for it. ``dcs``: settings."""
        capacity = versions_bytes + _SPARE_BYTES
        settings = {"arena_bytes": capacity, "disk_bytes": capacity,
                    "disk_dir": self.testbed.folder / f"{self.keys.job}-disk", **dcs}
        require_memory(SHM, capacity)
        require_memory(self.testbed.folder, int(str(settings["disk_bytes"])))
        process = self.processes[node_id] = spawn(python(
            "elastic_rl.dcs.node.service", "--etcd", self.testbed.endpoint, "--id", node_id, "--no-token",
            f"--job={self.keys.job}", *(f"--dcs.{key}={value}" for key, value in settings.items())),
            log=self._log(node_id))
        self._stack.callback(end, process)
        return process

    def _log(self, node_id: str) -> Path:
        return self.testbed.folder / f"{self.keys.job}-{node_id}.log"

    def await_nodes(self) -> dict[str, DcsNode]:
        """The records of all nodes that were started, once each has registered. Raises DeadlineExceeded."""
        def registered() -> dict[str, DcsNode] | None:
            records = [DcsNode.decode(kv.value) for kv in self.etcd.range(self.keys.dcs_nodes_prefix())[0]]
            found = {r.id: r for r in records if r.id in self.processes and r.pid == self.processes[r.id].pid}
            return found if len(found) == len(self.processes) else None

        try:
            return wait_until(registered, timeout_s=_START_S, what="the DCS nodes",
                              alive=lambda: all(p.poll() is None for p in self.processes.values()))
        except DeadlineExceeded as e:
            ended = [n for n, p in self.processes.items() if p.poll() is not None]
            raise Unmeasurable(f"{e.message}; {'; '.join(last_line(self._log(n)) for n in ended)}") from e

    def node(self, node_id: str, versions_bytes: int) -> DcsNode:
        """Starts one node and waits for it."""
        self.start(node_id, versions_bytes)
        return self.await_nodes()[node_id]

    def publisher(self, node: str, **settings: Any) -> Publisher:
        defaults = {"chunk_bytes": DCS.chunk_bytes, "staging_ttl_s": DCS.staging_ttl_s,
                    "io_timeout_s": DCS.io_timeout_s}
        out = Publisher(self.etcd, self.keys, STREAM, epoch=self.epoch, owner=f"bench-{next(self._names)}", node=node,
                        **{**defaults, **settings})
        self._stack.callback(out.close)
        return out

    def puller(self, node: str) -> Puller:
        out = Puller(self.etcd, self.keys, f"bench-{next(self._names)}", io_timeout_s=DCS.io_timeout_s, node=node)
        self._stack.callback(out.close)
        return out

    def settle(self) -> None:
        """Waits, between two samples, until the nodes have saved every chunk to disk, and has them drop all versions
        but the newest."""
        if any(p.poll() is None for p in self.processes.values()):
            wait_until(lambda: not any(n["unsaved"] for n in self._usage()), timeout_s=_SAVE_S, what="the nodes' disks")
        self._drop_old()

    def _usage(self) -> list[dict[str, Any]]:
        self._client = self._client or self.adopt(DcsClient(self.etcd, self.keys, io_timeout_s=DCS.io_timeout_s))
        return [self._client.connect(node).stat() for node in self.processes]

    def _drop_old(self) -> None:
        collector = GarbageCollector(self.etcd, self.keys, RetentionPolicy(1))
        try:
            for _ in range(2):  # released in the first, dropped in the second
                collector.sweep([])
        finally:
            collector.close()

    def worker(self, module: str, *args: str, env: Mapping[str, str] | None = None) -> Worker:
        """A process of a module (``workers.serve``) that ends with the cluster."""
        name = module.rpartition(".")[2]
        return self.adopt(Worker(module, *args, env=env, log=self.testbed.folder / f"{name}-{next(self._names)}.log"))

    def adopt(self, closing: Any) -> Any:
        """Closes something with the cluster; returns it."""
        self._stack.callback(closing.close)
        return closing


class Testbed:
    """One run of the bench. Everything it starts ends with the ``with`` block, also when it is interrupted."""

    def __init__(self, options: Options, stack: contextlib.ExitStack) -> None:
        self.options = options
        self._stack = stack
        self.folder = self._temporary(None)
        self.shm = self._temporary(SHM)
        self.endpoint, _ = start_etcd(self.folder, stack)
        self.etcd = stack.enter_context(EtcdClient([self.endpoint], call_timeout_s=5.0))

    @classmethod
    @contextmanager
    def start(cls, options: Options) -> Iterator[Self]:
        remove_leftovers()
        with contextlib.ExitStack() as stack:
            yield cls(options, stack)

    @property
    def nbytes(self) -> int:
        return self.options.nbytes

    @property
    def samples(self) -> int:
        """Number of samples, after one that does not count."""
        return 3 if self.options.quick else 5

    @contextmanager
    def cluster(self) -> Iterator[Cluster]:
        """Nodes and clients of one row."""
        with contextlib.ExitStack() as stack:
            yield Cluster(self, stack)

    def temporary(self) -> tuple[Path, Path]:
        """A new folder on disk and one in memory; both end with the testbed."""
        name = secrets.token_hex(3)
        folders = self.folder / name, self.shm / name
        for folder in folders:
            folder.mkdir()
        return folders

    def _temporary(self, parent: Path | None) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=parent))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder
