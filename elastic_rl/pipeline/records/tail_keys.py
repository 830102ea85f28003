"""The tail of a job's history in etcd."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic_rl.config import Stream
from elastic_rl.dcs.catalog import reads
from elastic_rl.errors import RecordUnreadable
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue, Op
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import RunLogHead, Version
from elastic_rl.etcd.transaction import batches
from elastic_rl.pipeline.records.history import Block, History, record_line
from elastic_rl.pipeline.records.segments import END_KEY, HISTORY_KEY

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tail:
    """Where a history stands, and what etcd has beyond that."""

    head: RunLogHead | None
    """Record of where the history stands; None where none has begun."""
    blocks: Sequence[Block]
    revision: int = 0
    """Mod revision of the head's key; 0 where there is none."""
    lost: bool = False
    """Whether etcd lost its data or was restored from an older snapshot, and the catalog was recovered: the stream has
    more than the head's key says, and records that came after what it has may be lost."""
    older: Sequence[int] = ()
    """Segments of which etcd has blocks that are none of the history, since the stream has what is in their place."""


def open_history(etcd: EtcdClient, keys: Keys, writer: FencedWriter, job: str) -> History:
    """The history of a job, which begins now where it has none. ``writer``: holds the token of the actor's term, so
    that no other one writes it any more. No DCS node is asked. Raises Fenced, EtcdUnavailable and RecordUnreadable."""
    tail = read_tail(etcd, keys)
    head = tail.head or RunLogHead(id=secrets.token_hex(8))
    history = History(head.id, head.sealed, tail.blocks)
    if not history.end:
        history.append(record_line("history", id=head.id, job=job, at=time.time()))
    elif tail.lost:
        history.append(record_line("gap", start=head.sealed, at=time.time()))
    if tail.revision and not tail.lost:
        return history
    # Before the head's key: once that is written, nothing tells these blocks from those of the history.
    for some in batches([Op.delete_prefix(keys.run_log_segment_prefix(start)) for start in tail.older]):
        writer.write(*some)
    blocks, _ = history.pending()  # with the record of the gap, which no later start would add
    if not writer([Compare.mod(keys.run_log_head(), "==", tail.revision)],
                  [Op.put(keys.run_log_head(), head.encode()), *put_ops(keys, blocks)]):
        return open_history(etcd, keys, writer, job)  # an attempt whose answer was lost
    history.commit(blocks)
    return history


def read_tail(etcd: EtcdClient, keys: Keys) -> Tail:
    """Where the history stands, as the head's key and the stream's newest version say, and what etcd has of its tail.
    Raises EtcdUnavailable and RecordUnreadable."""
    # The version first: each commit writes the head's key with it, so the key that is read after it is not older.
    version, unreadable = None, None
    try:
        version = reads.head(etcd, keys, Stream.RUN_LOG)
    except RecordUnreadable as e:
        unreadable = e
    kvs, _ = etcd.range(keys.run_log_prefix())
    found = {kv.key: kv for kv in kvs}
    kv = found.pop(keys.run_log_head(), None)
    if unreadable is not None:
        if kv is None:
            raise unreadable
        log.warning("the records of the run may go on from an older state: %s", unreadable)
    return tail_of(reads.decode(RunLogHead, kv) if kv is not None else None, kv.mod_revision if kv is not None else 0,
                   version, [block_of(keys, kv) for kv in found.values()])


def tail_of(head: RunLogHead | None, revision: int, version: Version | None, blocks: Iterable[Block]) -> Tail:
    """The tail of a history by what etcd has of it and of the stream. Pure. ``head``, ``blocks``: what etcd has.
    ``version``: the newest of the stream.

    Blocks of segments that begin before the stream's end are another course of the history, which the stream has
    replaced. Those of later segments were written after the snapshot, by an actor that knew the stream or that began
    again before the recovery: they are whole lines, and are kept."""
    blocks, sealed = list(blocks), _sealed(version)
    if sealed is None or (head is not None and (head.id != sealed.id or head.sealed >= sealed.sealed)):
        return Tail(head, blocks, revision)
    return Tail(sealed, [b for b in blocks if b.segment >= sealed.sealed], revision, lost=True,
                older=tuple(sorted({b.segment for b in blocks if b.segment < sealed.sealed})))


def _sealed(version: Version | None) -> RunLogHead | None:
    """What the commit of a version has written to the head's key."""
    identity, end = (version.meta.get(HISTORY_KEY), version.meta.get(END_KEY)) if version is not None else (None, None)
    return RunLogHead(id=identity, sealed=end) if identity and isinstance(identity, str) and isinstance(end, int) \
        else None


def block_of(keys: Keys, kv: KeyValue) -> Block:
    """The block that etcd has under a key of the tail."""
    segment, offset = kv.key.removeprefix(keys.run_log_prefix()).split("/")[-2:]
    return Block(int(segment), int(offset), kv.value)


def put_ops(keys: Keys, blocks: Sequence[Block]) -> list[Op]:
    """The writes that put blocks of the tail into etcd."""
    return [Op.put(keys.run_log_block(b.segment, b.offset), b.data) for b in blocks]
