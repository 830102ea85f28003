"""What a stub in the place of a driver writes as one, and what etcd has of that.

Each write that etcd takes is a key, so that whoever reads them has the order in which they were taken, and by whom. A
writer keeps a file on its host of what it has tried.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from elastic_rl.config import Config
from elastic_rl.errors import Conflict, EtcdUnavailable, Fenced
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.etcd.transaction import Op
from elastic_rl.host.paths import JobPaths

ACCEPTED, REFUSED, UNANSWERED = "accepted", "refused", "unanswered"


@dataclass(frozen=True)
class Driver:
    """A driver that has written."""

    epoch: int
    generation: int
    assignment: int
    """Generation of the assignment that it was started for."""
    host: str
    pid: int


class Writer:
    """A driver that begins once, as the product's does, and does not end when it is refused."""

    def __init__(self, ctx: RunContext, driver_id: str) -> None:
        # Its agent ends it soon after etcd has gone: a write is to be over before.
        self.etcd = EtcdClient.from_config(ctx.config.etcd, ctx.etcd_endpoints, retry_budget_s=1.0)
        self._ctx, self._id, self._writes = ctx, driver_id, 0
        self._driver: Driver | None = None

    def write(self) -> None:
        outcome = ACCEPTED
        try:
            if self._driver is None:
                self._driver = self._begin()
            writer = FencedWriter.of_driver(self.etcd, self._ctx.keys, self._driver.epoch, self._driver.generation)
            self._writes += 1
            key = f"{_prefix(self._ctx.job)}{self._driver.generation}-{self._driver.host}-{self._writes}"
            writer.write(Op.put(key, json.dumps(vars(self._driver)).encode()))
        except (Conflict, Fenced):
            outcome = REFUSED
        except EtcdUnavailable:
            outcome = UNANSWERED
        with _tried(self._ctx.config).open("a") as file:
            file.write(f"{os.getpid()} {outcome}\n")

    def _begin(self) -> Driver:
        token = fencing.assigned(ClusterKeys(self._ctx.config.cluster_name), self._ctx.job, self._ctx.assignment)
        epoch = fencing.raise_epoch(self.etcd, self._ctx.keys, self._id, token).number
        generation = fencing.begin_driver(self.etcd, self._ctx.keys, epoch, self._id, token)
        return Driver(epoch, generation, self._ctx.assignment, socket.gethostname(), os.getpid())


def tried(cfg: Config, outcome: str) -> int:
    """How many writes had this outcome on the host whose settings these are."""
    path = _tried(cfg)
    return sum(line.split()[1:] == [outcome] for line in path.read_text().splitlines()) if path.exists() else 0


def accepted(etcd: EtcdClient, job: str) -> list[Driver]:
    """The drivers that have written, in the order in which etcd has taken the writes."""
    kvs = sorted(etcd.range(_prefix(job))[0], key=lambda kv: kv.mod_revision)
    return [Driver(**json.loads(kv.value)) for kv in kvs]


def assert_one_at_a_time(writes: Sequence[Driver]) -> list[Driver]:
    """Fails where a driver has written after a later one has; returns the drivers, in their order."""
    drivers = [driver for driver, _ in groupby(writes)]
    for one, following in pairwise(drivers):
        assert one.epoch < following.epoch and one.generation < following.generation, (one, following)
        assert one.assignment <= following.assignment, (one, following)
    return drivers


def _prefix(job: str) -> str:
    return f"/stub_driver/{job}/"


def _tried(cfg: Config) -> Path:
    return JobPaths.of(cfg).private / "tried"
