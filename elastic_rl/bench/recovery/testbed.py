"""What the rows share: one cluster, later with a run on it, and the end of both."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import psutil

from elastic_rl.bench.loop import job
from elastic_rl.bench.options import Options
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.faults.context import FaultContext
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.runtime.process import runs

TRIAL_S = 600.0
"""Longest wait until what was killed is back."""
CALL_S = 1.0
"""Time for one answer of etcd or the API: a part that is away must not hide when another one is back."""
_STEPS = 1_000_000
"""Steps of the job: more than are done while it is measured."""


class Testbed:
    """One cluster with the default settings. Everything that it starts ends with the ``with`` block; when this process
    is killed, the cluster's host agent ends it."""

    def __init__(self, options: Options, stack: contextlib.ExitStack) -> None:
        self.options = options
        self.folder = Path(tempfile.mkdtemp(prefix="erl-bench-recovery-"))
        stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        cfg = job.configure_short_steps(self.folder, options, _STEPS)
        os.environ.update(cfg.device.environment())  # a bare engine sees the GPUs that the run's engines see
        self.cluster = Cluster(cfg, say=options.say)
        self.cfg = self.cluster.cfg
        stack.enter_context(self.cluster.owned())
        stack.callback(self.cluster.down)
        self.info = self.cluster.up()
        self.etcd = stack.enter_context(EtcdClient.from_config(self.cfg.etcd, self.info.etcd_endpoints,
                                                               retry_budget_s=CALL_S))
        self.context = FaultContext(self.cfg, self.etcd, Keys(self.cfg.job), AdminClient(self.info, timeout_s=CALL_S))

    @classmethod
    @contextmanager
    def start(cls, options: Options) -> Iterator[Self]:
        with contextlib.ExitStack() as stack:
            yield cls(options, stack)

    @property
    def trials(self) -> int:
        return 3 if self.options.quick else 20

    @contextmanager
    def run(self) -> Iterator[None]:
        """Trains within the block."""
        self.options.say("starting the run")
        self.cluster.submit()
        try:
            yield
        finally:
            self.cluster.stop_run()

    def new_folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        return folder


def alive(pid: int) -> bool:
    """Whether there is a process that runs. A part's record outlives its process."""
    try:
        return bool(pid) and runs(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False
