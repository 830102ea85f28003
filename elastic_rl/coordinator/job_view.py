"""The job as the API shows it: its status, epoch and leader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from pydantic import BaseModel

from elastic_rl.etcd.client import EtcdClient, KeyValue, Op
from elastic_rl.etcd.decoding import decode
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Epoch, JobStatus, Leader, Record

R = TypeVar("R", bound=Record)


class JobView(BaseModel):
    """A job by its ``name``. ``status`` is null before its first run, ``leader`` while no replica decides about it."""

    name: str
    status: JobStatus | None = None
    epoch: int = 0
    leader: Leader | None = None
    replica: str
    """The coordinator that answered."""


def view(keys: Keys, replica: str, kvs: Iterable[KeyValue]) -> JobView:
    """The job as those of its keys say that are in ``keys_of``. What this release cannot read is shown as missing."""
    found = {kv.key: kv for kv in kvs}

    def read(key: str, kind: type[R]) -> R | None:
        return decode(found[key], kind, {}) if key in found else None

    epoch = read(keys.epoch(), Epoch)
    return JobView(name=keys.job, status=read(keys.job_status(), JobStatus), epoch=epoch.number if epoch else 0,
                   leader=read(keys.leader(), Leader), replica=replica)


def keys_of(keys: Keys) -> tuple[str, ...]:
    """The keys that the view of a job is made of."""
    return keys.job_status(), keys.epoch(), keys.leader()


def read(etcd: EtcdClient, keys: Keys, replica: str) -> JobView:
    """The job as of one revision. Raises EtcdUnavailable."""
    return view(keys, replica, etcd.txn([], [Op.get(key) for key in keys_of(keys)]).kvs)
