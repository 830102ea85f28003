"""Transactions as values: comparisons, operations and results. Nothing here does I/O."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from elastic_rl.etcd.pb import etcd_pb2 as pb
from elastic_rl.runtime import sequences

T = TypeVar("T")

MAX_OPS = 100
"""Operations that are put into one transaction. etcd takes 128 unless ``--max-txn-ops`` says otherwise; the rest is
room for the reads of a fencing token and for the deduplication of the write."""
MAX_BYTES = 1 << 20
"""Bytes that are put into one transaction. etcd takes requests of 1.5 MiB unless ``--max-request-bytes`` says
otherwise; the rest is room for the conditions, and for what a caller adds."""

Relation = Literal["==", "!=", "<", ">"]
_RESULTS = {"==": pb.Compare.EQUAL, "!=": pb.Compare.NOT_EQUAL, "<": pb.Compare.LESS, ">": pb.Compare.GREATER}
_TARGETS = {"mod": pb.Compare.MOD, "create": pb.Compare.CREATE, "version": pb.Compare.VERSION,
            "value": pb.Compare.VALUE}
_FIELDS = {"mod": "mod_revision", "create": "create_revision", "version": "version", "value": "value"}
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt}


def range_end(prefix: str) -> bytes:
    """First key after every key that starts with ``prefix``; the empty prefix means all keys."""
    raw = prefix.encode()
    while raw:
        if raw[-1] < 0xFF:
            return raw[:-1] + bytes([raw[-1] + 1])
        raw = raw[:-1]
    return b"\0"  # means "to the end" in etcd's API


@dataclass(frozen=True)
class KeyValue:
    """A key as it was at one revision. ``lease`` is 0 for a key that lives until it is deleted."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int

    @classmethod
    def from_message(cls, kv: Any) -> KeyValue:
        """Reads the wire message."""
        return cls(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)


@dataclass(frozen=True)
class Compare:
    """A condition of a transaction on one key, or on every key of a range. An absent key has revisions and version 0,
    and no value; a range without keys meets every condition but one on a value."""

    key: str
    target: Literal["mod", "create", "version", "value"]
    relation: Relation
    operand: int | bytes
    prefix: bool = False
    """Whether ``key`` is a prefix, and the condition is on each key that begins with it."""

    @classmethod
    def mod(cls, key: str, relation: Relation, revision: int) -> Compare:
        """A condition on the revision of the last change; ``mod(key, "==", 0)`` holds for an absent key."""
        return cls(key, "mod", relation, revision)

    @classmethod
    def create(cls, key: str, relation: Relation, revision: int) -> Compare:
        """A condition on the revision at which the key was created."""
        return cls(key, "create", relation, revision)

    @classmethod
    def version(cls, key: str, relation: Relation, version: int) -> Compare:
        """A condition on the number of puts since the key was created."""
        return cls(key, "version", relation, version)

    @classmethod
    def value(cls, key: str, relation: Relation, value: bytes) -> Compare:
        """A condition on the value; false for an absent key."""
        return cls(key, "value", relation, value)

    @classmethod
    def none_created_since(cls, prefix: str, revision: int) -> Compare:
        """No key of the range came into being after ``revision``. One comparison, however many keys there are."""
        return cls(prefix, "create", "<", revision + 1, prefix=True)

    @classmethod
    def none_changed_since(cls, prefix: str, revision: int) -> Compare:
        """No key of the range was put after ``revision``. One comparison; a key that was deleted is not seen."""
        return cls(prefix, "mod", "<", revision + 1, prefix=True)

    @classmethod
    def exists(cls, key: str) -> Compare:
        return cls.create(key, ">", 0)

    @classmethod
    def absent(cls, key: str) -> Compare:
        return cls.create(key, "==", 0)

    def holds(self, kv: KeyValue | None) -> bool:
        """Whether the condition holds for the key as it was read, evaluated as etcd does."""
        if kv is None and self.target == "value":
            return False
        actual = getattr(kv, _FIELDS[self.target]) if kv is not None else 0
        return _OPERATORS[self.relation](actual, self.operand)

    def to_message(self) -> Any:
        operand: dict[str, Any] = {_FIELDS[self.target]: self.operand}
        return pb.Compare(key=self.key.encode(), result=_RESULTS[self.relation], target=_TARGETS[self.target],
                          range_end=range_end(self.key) if self.prefix else b"", **operand)


@dataclass(frozen=True)
class Op:
    """One step of a transaction. etcd allows at most one write of a key in a transaction."""

    kind: Literal["put", "get", "get_prefix", "delete", "delete_prefix"]
    key: str
    data: bytes = b""
    lease: int = 0

    @classmethod
    def put(cls, key: str, value: bytes, lease: int = 0) -> Op:
        return cls("put", key, value, lease)

    @classmethod
    def get(cls, key: str) -> Op:
        return cls("get", key)

    @classmethod
    def get_prefix(cls, prefix: str) -> Op:
        """Reads a range in one answer: only for ranges known to be small (``EtcdClient.range`` reads in pages)."""
        return cls("get_prefix", prefix)

    @classmethod
    def delete(cls, key: str) -> Op:
        return cls("delete", key)

    @classmethod
    def delete_prefix(cls, prefix: str) -> Op:
        return cls("delete_prefix", prefix)

    @property
    def nbytes(self) -> int:
        """Bytes of the key and the value."""
        return len(self.key.encode()) + len(self.data)

    @property
    def writes(self) -> bool:
        return not self.kind.startswith("get")

    def to_message(self) -> Any:
        key = self.key.encode()
        if self.kind == "put":
            return pb.RequestOp(request_put=pb.PutRequest(key=key, value=self.data, lease=self.lease))
        end = range_end(self.key) if self.kind.endswith("_prefix") else b""
        start = key or (b"\0" if end else key)
        if self.writes:
            return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=start, range_end=end))
        return pb.RequestOp(request_range=pb.RangeRequest(key=start, range_end=end))


@dataclass(frozen=True)
class TxnResult:
    """The outcome of a transaction."""

    succeeded: bool
    """Whether every comparison held, so that ``then`` ran and not ``orelse``."""
    revision: int
    """Revision of etcd at which it ran; that of its writes, if it wrote."""
    kvs: tuple[KeyValue, ...] = ()
    """Keys and values of the gets in the branch that ran, in their order; absent keys are left out."""
    deleted: int | None = 0
    """Keys deleted; None when the answer was lost and only the write token showed that it had been applied."""

    def get(self, key: str) -> KeyValue | None:
        """What a get of the branch found under the key."""
        return next((kv for kv in self.kvs if kv.key == key), None)

    def unchanged(self, key: str) -> Compare:
        """The condition that a key is still as a get of the branch has found it, absent included."""
        found = self.get(key)
        return Compare.mod(key, "==", found.mod_revision if found is not None else 0)


def result(succeeded: bool, responses: Iterable[Any], revision: int) -> TxnResult:
    """The value of the wire answers of a transaction's steps."""
    kvs = tuple(KeyValue.from_message(kv) for r in responses for kv in r.response_range.kvs)
    deleted = sum(r.response_delete_range.deleted for r in responses)
    return TxnResult(succeeded, revision, kvs, deleted)


GuardedWrite = Callable[[Sequence[Compare], Sequence[Op]], bool]
"""Runs a transaction under the caller's fencing token and returns whether the other comparisons held. Raises Fenced
when the token no longer holds. ``fencing.FencedWriter`` is one."""


def batches(items: Sequence[T], size: int = MAX_OPS, *, nbytes: Callable[[T], int] = lambda item: 0
            ) -> Iterator[Sequence[T]]:
    """Splits what is to be written into parts that each fit into one transaction, in order. ``nbytes``: of an item, for
    those that may be large."""
    return sequences.batches(items, size, nbytes=nbytes, most_bytes=MAX_BYTES)
