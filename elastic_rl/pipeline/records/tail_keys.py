"""The tail of a job's history in etcd."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from elastic_rl.config import Stream
from elastic_rl.dcs.catalog import reads
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue, Op
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import RunLogHead
from elastic_rl.pipeline.records.history import Block, History, record_line
from elastic_rl.pipeline.records.segments import END_KEY, HISTORY_KEY


def open_history(etcd: EtcdClient, keys: Keys, writer: FencedWriter, job: str) -> History:
    """The history of a job, which begins now where it has none. ``writer``: holds the token of the actor's term, so
    that no other one writes it any more. Raises Fenced, EtcdUnavailable and RecordUnreadable."""
    head, blocks = read_tail(etcd, keys)
    lost = False
    if head is None:
        version = reads.head(etcd, keys, Stream.RUN_LOG)
        if version is not None and version.meta.get(HISTORY_KEY):  # etcd was lost, and the catalog recovered
            head, lost = RunLogHead(id=str(version.meta[HISTORY_KEY]), sealed=int(version.meta[END_KEY])), True
        else:
            head = RunLogHead(id=secrets.token_hex(8))
        if not writer([Compare.absent(keys.run_log_head())], [Op.put(keys.run_log_head(), head.encode())]):
            return open_history(etcd, keys, writer, job)  # an attempt whose answer was lost
    history = History(head.id, head.sealed, blocks)
    if not history.end:
        history.append(record_line("history", id=head.id, job=job, at=time.time()))
    elif lost:
        history.append(record_line("gap", start=head.sealed, at=time.time()))
    return history


def read_tail(etcd: EtcdClient, keys: Keys) -> tuple[RunLogHead | None, list[Block]]:
    """Where the history stands, and what etcd has of its tail, as of one revision. None where no history has begun.
    Raises EtcdUnavailable and RecordUnreadable."""
    kvs, _ = etcd.range(keys.run_log_prefix())
    found = {kv.key: kv for kv in kvs}
    head = found.pop(keys.run_log_head(), None)
    return (reads.decode(RunLogHead, head) if head is not None else None), [_block(keys, kv) for kv in found.values()]


def _block(keys: Keys, kv: KeyValue) -> Block:
    segment, offset = kv.key.removeprefix(keys.run_log_prefix()).split("/")[-2:]
    return Block(int(segment), int(offset), kv.value)


def put_ops(keys: Keys, blocks: Sequence[Block]) -> list[Op]:
    """The writes that put blocks of the tail into etcd."""
    return [Op.put(keys.run_log_block(b.segment, b.offset), b.data) for b in blocks]
