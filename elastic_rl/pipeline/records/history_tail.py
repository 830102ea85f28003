"""Follows a job's history in etcd, for who shows it on a host that has no copy of it, or one that does not grow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from elastic_rl.etcd.client import EtcdClient, KeyValue
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.mirror import Mirror
from elastic_rl.etcd.records import RunLogHead
from elastic_rl.pipeline.records.history import Block
from elastic_rl.pipeline.records.tail_keys import block_of


def appended(blocks: Iterable[Block], offset: int) -> tuple[bytes, int]:
    """The bytes that blocks have from an offset on, and the offset after them. Pure. What none of them has, since it
    was sealed meanwhile, is passed over: a line break stands for it, so that it ends the line that it cuts."""
    found = bytearray()
    for block in sorted(blocks, key=lambda b: (b.offset, b.end)):
        if block.end > offset:
            if block.offset > offset:
                found += b"\n"
                offset = block.offset
            found += block.data[offset - block.offset:]
            offset = block.end
    return bytes(found), offset


class HistoryTail:
    """What is appended to a history. For one thread; a context manager."""

    def __init__(self, etcd: EtcdClient, keys: Keys, identity: str, offset: int | None) -> None:
        """``identity``: of the history that is known up to ``offset``; empty where none has begun yet. ``offset``:
        None: all that etcd has is read."""
        self._keys, self._identity, self._offset = keys, identity, offset
        self._mirror = Mirror(etcd, keys.run_log_prefix(), self._decode)

    def read(self, timeout_s: float) -> bytes:
        """The next bytes, as soon as there are some, and after ``timeout_s`` at the latest. Raises EtcdUnavailable."""
        values = self._mirror.read(timeout_s)
        head = values.get(self._keys.run_log_head())
        blocks = [value for value in values.values() if isinstance(value, Block)]
        if not isinstance(head, RunLogHead):
            return b""
        if self._offset is None:
            self._offset = head.sealed
        elif head.id != self._identity:
            self._offset = 0  # it has begun, or is that of another job of this name
        self._identity = head.id
        found, self._offset = appended(blocks, self._offset)
        return found

    def _decode(self, kv: KeyValue) -> Block | RunLogHead | None:
        return readable_one(kv, RunLogHead) if kv.key == self._keys.run_log_head() else block_of(self._keys, kv)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._mirror.close()
