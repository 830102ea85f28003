"""The job as the API shows it: its status, epoch and leader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from pydantic import BaseModel

from elastic_rl.etcd.client import EtcdClient, KeyValue, Op
from elastic_rl.etcd.decoding import decode
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Epoch, JobHealth, JobProblem, JobStatus, Leader, Record

R = TypeVar("R", bound=Record)


class JobView(BaseModel):
    """A job by its ``name``. ``status`` is null before its first run, ``leader`` while no replica decides about it.
    ``health`` and ``message``: whether the replica that answered and the leader can do so, and what keeps them from it.
    """

    name: str
    status: JobStatus | None = None
    epoch: int = 0
    leader: Leader | None = None
    health: JobHealth = JobHealth.OK
    message: str = ""
    replica: str
    """The coordinator that answered."""


def view(keys: Keys, replica: str, kvs: Iterable[KeyValue], problem: JobProblem | None = None) -> JobView:
    """The job as those of its keys say that are in ``keys_of``. What this release cannot read is shown as missing.
    ``problem``: what this replica knows itself, which counts more than what the leader has written."""
    found = {kv.key: kv for kv in kvs}

    def read(key: str, kind: type[R]) -> R | None:
        return decode(found[key], kind, {}) if key in found else None

    epoch, problem = read(keys.epoch(), Epoch), problem or read(keys.leader_problem(), JobProblem)
    return JobView(name=keys.job, status=read(keys.job_status(), JobStatus), epoch=epoch.number if epoch else 0,
                   leader=read(keys.leader(), Leader), health=problem.health if problem else JobHealth.OK,
                   message=f"{problem.replica}: {problem.message}" if problem else "", replica=replica)


def keys_of(keys: Keys) -> tuple[str, ...]:
    """The keys that the view of a job is made of."""
    return keys.job_status(), keys.epoch(), keys.leader(), keys.leader_problem()


def read(etcd: EtcdClient, keys: Keys, replica: str, problem: JobProblem | None = None) -> JobView:
    """The job as of one revision. ``problem``: as for ``view``. Raises EtcdUnavailable."""
    return view(keys, replica, etcd.txn([], [Op.get(key) for key in keys_of(keys)]).kvs, problem)
