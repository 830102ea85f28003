"""Writes of what stands in the place of a driver: it goes on when it is refused, so that only what etcd refuses keeps
two of them apart. ``light_job`` makes steps with them.

Each write that etcd takes is a key of the job, so that whoever reads them has the order in which they were taken, and
by whom. A writer keeps a file on its host of what it has tried.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_rl.config import Config
from elastic_rl.errors import Conflict, ElasticRLError, EtcdUnavailable, Fenced
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import JobStatus
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.etcd.transaction import Op
from elastic_rl.host.paths import JobPaths
from elastic_rl.runtime.process import die_with_parent

PREFIX = "stub_driver/"
"""How the names of the keys begin, below the root of the job."""
ACCEPTED, REFUSED, UNANSWERED = "accepted", "refused", "unanswered"
_PAUSE_S = 0.1
_COMMAND = (sys.executable, "-m", "chaos_tests.traffic.driver_writes")
_SITE = """
import sys
if "elastic_rl.run_service" in sys.orig_argv:
    from elastic_rl import train
    python = train.processes.python
    train.job_check.require = lambda *_, **__: []
    train.processes.python = lambda module, *args: (
        COMMAND + list(args) if module == "elastic_rl.driver" else python(module, *args))
"""
"""What the interpreter of a run executes when it starts, because the environment that the run was submitted with says
so: a run that the host agent has started must have that environment too."""


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
        with self.trying():
            self.put()

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """The block tries to write, and ends without an error where that is refused, or cannot be done now."""
        outcome = ACCEPTED
        try:
            yield
        except (Conflict, Fenced):
            outcome = REFUSED
        except ElasticRLError:
            outcome = UNANSWERED
        with _tried(self._ctx.config).open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {outcome}\n")

    def put(self, *ops: Op) -> None:
        """One write of the driver, with further changes. Raises as ``FencedWriter.write``."""
        driver, writer = self.begun(), self.fenced()
        self._writes += 1
        key = f"{_prefix(self._ctx.job)}{driver.generation}-{driver.host}-{self._writes}"
        writer.write(Op.put(key, json.dumps(vars(driver)).encode()), *ops)

    def fenced(self) -> FencedWriter:
        driver = self.begun()
        return FencedWriter.of_driver(self.etcd, self._ctx.keys, driver.epoch, driver.generation)

    def begun(self) -> Driver:
        """The driver, which begins with the first call that succeeds. Raises Fenced, Conflict and EtcdUnavailable."""
        if self._driver is None:
            token = fencing.assigned(ClusterKeys(self._ctx.config.cluster_name), self._ctx.job, self._ctx.assignment)
            epoch = fencing.raise_epoch(self.etcd, self._ctx.keys, self._id, token).number
            generation = fencing.begin_driver(self.etcd, self._ctx.keys, epoch, self._id, token)
            self._driver = Driver(epoch, generation, self._ctx.assignment, socket.gethostname(), os.getpid())
        return self._driver


def tried(cfg: Config, outcome: str) -> int:
    """How many writes had this outcome on the host whose settings these are."""
    path = _tried(cfg)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return sum(line.split()[1:] == [outcome] for line in lines)


def accepted(etcd: EtcdClient, job: str) -> list[Driver]:
    """The drivers that have written, in the order in which etcd has taken the writes."""
    kvs = sorted(etcd.range(_prefix(job))[0], key=lambda kv: kv.mod_revision)
    return [Driver(**json.loads(kv.value)) for kv in kvs]


def works(etcd: EtcdClient, job: str, assignment: int, since: int = 0) -> bool:
    """Whether the newest write that etcd has taken is of the driver that was started for this assignment, and the job
    has made a step after a revision."""
    newest = max(etcd.range(_prefix(job), limit=1, newest_first=True)[0], key=lambda kv: kv.mod_revision, default=None)
    if newest is None or Driver(**json.loads(newest.value)).assignment != assignment:
        return False
    steps = etcd.range(Keys(job).steps_prefix(), limit=1, newest_first=True)[0] if since else []
    return not since or any(step.mod_revision > since for step in steps)


def write_until_finished(ctx: RunContext, driver_id: str) -> None:
    """Writes until the job's status is ``finished``."""
    writer = Writer(ctx, driver_id)
    while True:
        writer.write()
        with contextlib.suppress(EtcdUnavailable):
            status = readable_one(writer.etcd.get(ctx.keys.job_status()), JobStatus)
            if status is not None and status.phase == "finished":
                return
        time.sleep(_PAUSE_S)


def environment(folder: Path, command: Sequence[str] = _COMMAND) -> dict[str, str]:
    """Variables with which what is submitted has a command in the place of its driver, and a job that is not checked.
    ``folder``: one for the means, which each host sees. ``command``: this module by default."""
    (site := folder / "site").mkdir()
    (site / "sitecustomize.py").write_text(f"COMMAND = {[*command]!r}\n{_SITE}", encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))}


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", required=True)
    parser.add_argument("--id", required=True)
    args = parser.parse_args()
    write_until_finished(RunContext.load(args.context), args.id)


def _prefix(job: str) -> str:
    return f"{Keys(job).root}{PREFIX}"


def _tried(cfg: Config) -> Path:
    return JobPaths.of(cfg).private / "tried"


if __name__ == "__main__":
    main()
