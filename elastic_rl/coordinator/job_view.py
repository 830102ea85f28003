"""The job as the API shows it: its status, epoch and leader."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from elastic_rl.coordinator.election.election import leading
from elastic_rl.etcd.client import EtcdClient, KeyValue, Op
from elastic_rl.etcd.decoding import decode
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Epoch, JobStatus, Leader


class JobView(BaseModel):
    """A job. ``status`` is null before its first run, ``leader`` while no replica leads."""

    job: str
    status: JobStatus | None = None
    epoch: int = 0
    leader: Leader | None = None
    replica: str
    """The coordinator that answered."""


def view(keys: Keys, replica: str, status: KeyValue | None, epoch: KeyValue | None,
         candidates: Sequence[KeyValue]) -> JobView:
    first = leading(candidates)
    # What this release cannot read is shown as missing.
    current = decode(epoch, Epoch, {}) if epoch else None
    return JobView(job=keys.job, status=decode(status, JobStatus, {}) if status else None,
                   epoch=current.number if current else 0, leader=decode(first, Leader, {}) if first else None,
                   replica=replica)


def read(etcd: EtcdClient, keys: Keys, replica: str) -> JobView:
    """The job as of one revision. Raises EtcdUnavailable."""
    found = etcd.txn([], [Op.get(keys.job_status()), Op.get(keys.epoch()), Op.get_prefix(keys.leader_prefix())])
    return view(keys, replica, found.get(keys.job_status()), found.get(keys.epoch()),
                [kv for kv in found.kvs if kv.key.startswith(keys.leader_prefix())])
