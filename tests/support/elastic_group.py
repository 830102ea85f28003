"""A trainer group under torch elastic, with real etcd and a real DCS node, and a client of it."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from elastic_rl import config
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.host.leftovers import remove_files
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.processes import stop
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.trainer.service.client import TrainerClient, TrainerStatus
from support.cluster_files import make_secret
from support.dcs_nodes import await_node, spawn_node
from support.otlp_collector import Collector, collecting
from support.rank_processes import spawn_agent
from support.waiting import wait_until


@dataclass
class Group:
    ctx: RunContext
    etcd: EtcdClient
    keys: Keys
    client: TrainerClient
    agent: subprocess.Popen[bytes]
    node: subprocess.Popen[bytes]
    """The DCS node."""
    folder: Path
    spans: Collector

    def start_agent(self) -> None:
        self.agent = spawn_agent(self.folder / "context.json", log=self.folder / "trainer.log")

    def ready(self, *, after: str = "") -> TrainerStatus:
        """The status of a group, other than ``after``, that is ready."""
        def another() -> TrainerStatus | None:
            status = self.client.wait_ready()
            return status if status.group != after else None

        return wait_until(another, what="another trainer group")

    def newest_version(self) -> tuple[int, ...]:
        """The version of which the samples of the next step are, as its command says it; (1,) without a group that
        could refuse it."""
        status, _ = self.client._read_status()
        return (status.policy_version,) if status is not None else (1,)

    def ranks(self) -> list[psutil.Process]:
        alive = {m.pid for m in members(self.etcd, self.keys, "trainer")}
        return [psutil.Process(pid) for pid in sorted(alive) if psutil.pid_exists(pid)]

    def rank(self, number: int) -> int:
        return next(m.pid for m in members(self.etcd, self.keys, "trainer") if m.id == f"rank-{number}")


@contextlib.contextmanager
def elastic_group(endpoints: list[str], folder: Path, settings: dict[str, Any], *, starts: bool = True
                  ) -> Iterator[Group]:
    """A group of a job with these settings, which is starting, if it ``starts``."""
    job = f"t-{secrets.token_hex(4)}"
    cfg = config.parse({"job": job, "seed": 1, "device": {"type": "cpu"}, "run_dir": str(folder / "runs"),
                        "etcd": {"call_timeout_s": 2.0}, "dcs": {"arena_bytes": 64 << 20}, **settings})
    keys = Keys(job)
    with EtcdClient(endpoints, call_timeout_s=2.0) as etcd, collecting() as collector:
        telemetry = cfg.telemetry.model_copy(update={"otlp_endpoint": collector.endpoint})
        cfg = cfg.model_copy(update={"telemetry": telemetry})
        epoch = fencing.raise_epoch(etcd, keys, holder="test").number
        ctx = RunContext(config=cfg, etcd_endpoints=endpoints, job=job, epoch=epoch,
                         model_dir=str(make_model_dir(folder / "model", cfg)), host=LOOPBACK)
        ctx.save(folder / "context.json")
        make_secret(cfg)
        node = spawn_node(endpoints, keys, "node-0", folder, arena_bytes=cfg.dcs.arena_bytes)
        group = None
        try:
            await_node(etcd, keys, node)
            term = fencing.begin_term(etcd, keys, epoch, "test")
            client = TrainerClient(etcd, keys, dcs_security(cfg), epoch=epoch, term=term)
            group = Group(ctx, etcd, keys, client, node, node, folder, collector)
            if starts:
                group.start_agent()
            yield group
        finally:
            if group is not None:
                stop(group.agent.pid)
            stop(node.pid)
            remove_files(JobPaths.of(cfg).file_tag())
