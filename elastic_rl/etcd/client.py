"""The etcd client: linearizable reads, exactly-once guarded writes, leases and resuming watches over all members."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from elastic_rl.config import EtcdConfig
from elastic_rl.errors import Compacted, Conflict, EtcdDenied, Fenced
from elastic_rl.etcd import deduplication
from elastic_rl.etcd.access import Access
from elastic_rl.etcd.call_errors import AttemptFailed
from elastic_rl.etcd.channels import COMPACT, RANGE, STATUS, TIME_TO_LIVE, TXN, Channels
from elastic_rl.etcd.leases import KeptLease
from elastic_rl.etcd.pb import etcd_pb2 as pb
from elastic_rl.etcd.transaction import Compare, KeyValue, Op, TxnResult, range_end, result
from elastic_rl.etcd.watch import Watch, WatchEvent

__all__ = ["Compare", "KeptLease", "KeyValue", "MemberStatus", "Op", "Page", "EtcdClient", "TxnResult", "Watch",
           "WatchEvent"]

_UPDATE_TRIES = 64


@dataclass(frozen=True)
class Page:
    """A part of a range, as it was at ``revision``."""

    kvs: list[KeyValue]
    revision: int
    more: bool
    """Whether there are keys beyond the last one."""


@dataclass(frozen=True)
class MemberStatus:
    """What one etcd member says about itself; ``error`` is set, and the rest empty, when it did not answer."""

    endpoint: str
    version: str = ""
    is_leader: bool = False
    db_bytes: int = 0
    """Size of its database's file, which its quota is about."""
    db_in_use_bytes: int = 0
    """What of that a defragmentation would leave."""
    error: str = ""
    alarms: Sequence[str] = ()
    """What it complains of, such as NOSPACE: then etcd takes no writes."""


class EtcdClient:
    """A connection to an etcd cluster. Synchronous, and safe to share between threads; not between processes.

    Reads are linearizable. Every write happens exactly once, or raises: OutcomeUnknown when it may have happened,
    EtcdUnavailable (its base) when it did not, EtcdRefused when etcd decided against it. Two kinds of
    EtcdUnavailable come at once and need a person: EtcdDenied and EtcdFull.
    """

    def __init__(self, endpoints: Sequence[str], *, call_timeout_s: float = 0.5, retry_budget_s: float = 15.0,
                 access: Access | None = None) -> None:
        """``endpoints`` are ``host:port``. Connects lazily; ``get`` something to see whether etcd is there."""
        self._channels = Channels(endpoints, call_timeout_s=call_timeout_s, retry_budget_s=retry_budget_s,
                                  access=access)
        self._tokens = deduplication.WriteDeduplicator(self._channels)

    @classmethod
    def from_config(cls, cfg: EtcdConfig, endpoints: Sequence[str], *, retry_budget_s: float | None = None) -> Self:
        """As the settings say, with their certificates and user. Raises ConfigError."""
        return cls(endpoints, call_timeout_s=cfg.call_timeout_s, access=Access.from_config(cfg),
                   retry_budget_s=cfg.retry_budget_s if retry_budget_s is None else retry_budget_s)

    @property
    def endpoints(self) -> list[str]:
        return list(self._channels.endpoints)

    @property
    def endpoint(self) -> str:
        """The member that calls go to now."""
        return self._channels.endpoints[self._channels.at]

    # -- reads -----------------------------------------------------------------------------------------------------
    def get(self, key: str) -> KeyValue | None:
        kvs = self._channels.call(RANGE, pb.RangeRequest(key=key.encode())).kvs
        return KeyValue.of(kvs[0]) if kvs else None

    def range(self, prefix: str, *, limit: int = 0, newest_first: bool = False) -> tuple[list[KeyValue], int]:
        """Keys under a prefix in key order (or latest created first), and the store's revision at the reading.

        ``watch(prefix, start_revision=revision + 1)`` goes on from there without a gap. ``limit`` 0 means all.
        """
        request = pb.RangeRequest(key=prefix.encode() or b"\0", range_end=range_end(prefix), limit=limit)
        if newest_first:
            request.sort_order, request.sort_target = pb.RangeRequest.DESCEND, pb.RangeRequest.CREATE
        response = self._channels.call(RANGE, request)
        return [KeyValue.of(kv) for kv in response.kvs], response.header.revision

    def page(self, prefix: str, *, limit: int, after: str = "", before: str = "", newest_first: bool = False,
             revision: int = 0) -> Page:
        """At most ``limit`` keys under a prefix in key order, or against it, between the keys ``after`` and ``before``.

        Against the order etcd looks at every key between them. ``revision`` 0 is the present. Raises Compacted for one
        that is no longer kept.
        """
        start = after.encode() + b"\0" if after else prefix.encode() or b"\0"
        end = before.encode() if before else range_end(prefix)
        request = pb.RangeRequest(key=start, range_end=end, limit=limit, revision=revision)
        if newest_first:
            request.sort_order, request.sort_target = pb.RangeRequest.DESCEND, pb.RangeRequest.KEY
        response = self._channels.call(RANGE, request)
        return Page([KeyValue.of(kv) for kv in response.kvs], revision or response.header.revision, response.more)

    def count(self, prefix: str, *, after: str = "", before: str = "") -> int:
        """Number of keys under a prefix, between two of them."""
        start = after.encode() + b"\0" if after else prefix.encode() or b"\0"
        request = pb.RangeRequest(key=start, range_end=before.encode() if before else range_end(prefix),
                                  count_only=True)
        return int(self._channels.call(RANGE, request).count)

    # -- writes ----------------------------------------------------------------------------------------------------
    def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """Writes one key, whatever it holds, and returns the revision. Raises LeaseLost."""
        return self.txn((), (Op.put(key, value, lease),)).revision

    def delete(self, key: str) -> bool:
        """Deletes one key. Whether it was there; true as well when that part of the answer was lost."""
        return self.txn((), (Op.delete(key),)).deleted != 0

    def delete_prefix(self, prefix: str) -> int:
        """Deletes every key under a prefix and returns how many there were."""
        there = self.count(prefix)
        deleted = self.txn((), (Op.delete_prefix(prefix),)).deleted
        return there if deleted is None else deleted

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()) -> TxnResult:
        """Runs ``then`` if every comparison holds, else ``orelse``, which only reads; atomically and exactly once."""
        if any(op.writes for op in orelse):
            raise ValueError("what a transaction does when its comparisons fail is to read, not to write")
        if any(op.writes for op in then):
            return self._tokens.run(compares, then, orelse)
        response = self._channels.call(TXN, pb.TxnRequest(
            compare=[c.message() for c in compares], success=[op.message() for op in then],
            failure=[op.message() for op in orelse]))
        return result(response.succeeded, response.responses, response.header.revision)

    def update(self, key: str, change: Callable[[bytes | None], bytes | None], *, lease: int = 0,
               guards: Sequence[Compare] = ()) -> bytes | None:
        """Replaces a value by ``change(value)``, which may be called again when another writer was faster.

        None stands for an absent key, both ways. Returns the new value. Raises Fenced when a guard does not hold,
        Conflict when other writers won every try.
        """
        current = self.get(key)
        for _ in range(_UPDATE_TRIES):
            new = change(current.value if current else None)
            if current is None and new is None and not guards:
                return None
            revision = current.mod_revision if current else 0
            ops = [Op.put(key, new, lease)] if new is not None else [Op.delete(key)]
            outcome = self.txn([Compare.mod(key, "==", revision), *guards], ops, [Op.get(key)])
            if outcome.succeeded:
                return new
            current = outcome.get(key)
            if (current.mod_revision if current else 0) == revision:
                raise Fenced(f"the update of {key} was refused: its fencing token is over")
        raise Conflict(f"{key} changed under each of {_UPDATE_TRIES} tries to update it")

    # -- leases and watches ----------------------------------------------------------------------------------------
    def grant(self, ttl_s: int) -> int:
        """A new lease that ends ``ttl_s`` seconds after its last keep-alive; its keys end with it."""
        return deduplication.grant(self._channels, ttl_s)

    def revoke(self, lease: int) -> None:
        """Ends a lease now; one that is gone already is fine."""
        deduplication.revoke(self._channels, lease)

    def keepalive(self, ttl_s: int) -> KeptLease:
        """A new lease that a background thread keeps alive until it is closed or lost."""
        granted_at = time.monotonic()
        return KeptLease(self._channels, deduplication.grant(self._channels, ttl_s), ttl_s, granted_at=granted_at)

    def lease_left(self, lease: int) -> int:
        """Whole seconds until a lease ends if nobody keeps it alive; 0 when it has ended."""
        return max(0, int(self._channels.call(TIME_TO_LIVE, pb.LeaseTimeToLiveRequest(ID=lease)).TTL))

    def watch(self, prefix: str, *, start_revision: int) -> Watch:
        """Changes under a prefix from ``start_revision`` on, each once and in order, over failures of members."""
        return Watch(self._channels, prefix, start_revision)

    # -- upkeep ----------------------------------------------------------------------------------------------------
    def compact(self, revision: int) -> None:
        """Forgets what keys were before ``revision``; watches from earlier ones get Compacted."""
        with contextlib.suppress(Compacted):  # another was faster, or our own first attempt was
            self._channels.call(COMPACT, pb.CompactionRequest(revision=revision))

    def statuses(self) -> list[MemberStatus]:
        """What each member says about itself, asked once each."""
        out = []
        for i, endpoint in enumerate(self._channels.endpoints):
            try:
                s = self._channels.once(STATUS, pb.StatusRequest(), i)
                out.append(MemberStatus(endpoint, s.version, s.leader == s.header.member_id, s.dbSize, s.dbSizeInUse,
                                        alarms=_alarms(s.errors)))
            except AttemptFailed as e:
                out.append(MemberStatus(endpoint, error=str(e)))
            except EtcdDenied as e:
                out.append(MemberStatus(endpoint, error=e.message))
        return out

    def close(self) -> None:
        """Gives this client's tokens back and closes the connections; open watches and leases end with it."""
        if not self._channels.closed.is_set():
            self._tokens.close()
            self._channels.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _alarms(errors: Sequence[str]) -> tuple[str, ...]:
    """Names of the alarms in a member's complaints, each of which is ``memberID:… alarm:NAME``."""
    return tuple(e.rpartition("alarm:")[2].strip() or e for e in errors)
