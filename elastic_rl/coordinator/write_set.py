"""Conditions and writes of one transaction that several parts of the leader put together."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_rl.etcd.records import Record
from elastic_rl.etcd.transaction import Compare, Op


@dataclass
class WriteSet:
    compares: list[Compare] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)

    def put(self, key: str, revision: int, record: Record) -> None:
        """Writes a record if its key was last changed at ``revision``; 0 for a key that must be absent."""
        self.compares.append(Compare.mod(key, "==", revision))
        self.ops.append(Op.put(key, record.encode()))

    def delete(self, key: str, revision: int) -> None:
        """Deletes a key if it was last changed at ``revision``."""
        self.compares.append(Compare.mod(key, "==", revision))
        self.ops.append(Op.delete(key))

    def require(self, *compares: Compare) -> None:
        self.compares += compares

    def add(self, *ops: Op) -> None:
        self.ops += ops

    def merge(self, other: WriteSet) -> None:
        self.compares += other.compares
        self.ops += other.ops
