"""The etcd client: linearizable reads, exactly-once guarded writes, leases and resuming watches over all members."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from elastic_rl.config import EtcdConfig
from elastic_rl.errors import Compacted, Conflict, EtcdDenied, EtcdRefused, EtcdUnavailable, Fenced
from elastic_rl.etcd import leases
from elastic_rl.etcd.access import Access
from elastic_rl.etcd.call_errors import AttemptFailed, Failure, refusal
from elastic_rl.etcd.channels import (
    ALARM,
    COMPACT,
    DEFRAGMENT,
    MEMBER_ADD,
    MEMBER_LIST,
    MEMBER_PROMOTE,
    MEMBER_REMOVE,
    MEMBER_UPDATE,
    RANGE,
    STATUS,
    TIME_TO_LIVE,
    TXN,
    Channels,
)
from elastic_rl.etcd.deduplication import WriteDeduplicator
from elastic_rl.etcd.leases import KeptLease
from elastic_rl.etcd.member_metrics import QuotaReader
from elastic_rl.etcd.pb import etcd_pb2 as pb
from elastic_rl.etcd.transaction import Compare, KeyValue, Op, TxnResult, range_end, result
from elastic_rl.etcd.watch import Watch, WatchEvent
from elastic_rl.runtime.clock import boottime_s

__all__ = ["ClusterMember", "Compare", "EtcdClient", "KeptLease", "KeyValue", "MemberStatus", "Op", "Page", "TxnResult",
           "Watch", "WatchEvent"]

_MAX_UPDATES = 64
_MAX_RANGE_READS = 5
"""How often a range is read from the start when compactions overtake it."""
_FIRST_PAGE, _MAX_PAGE = 500, 5000
"""Keys of a range's first page, and at most of a later one."""
_PAGE_BYTES = 1 << 20
"""Size of the later pages, by the mean size of the keys before them."""
_RANGE_BYTES_PER_S = 4 << 20
"""Slowest rate at which a page is expected to arrive, with ``_KEY_BYTES`` for each key; its deadline follows."""
_KEY_BYTES = 1 << 10
_MAX_RANGE_TIMEOUT_S = 4.0
_RANGE_EXTRA_S = 2.0
"""Time for what was put into a range, beyond that for one call: etcd reads all of the range."""
_RECONFIGURE_S = 5.0
"""Deadline of a change of the members, which a majority has to write down."""


@dataclass(frozen=True)
class Page:
    """A part of a range, as it was at ``revision``."""

    kvs: list[KeyValue]
    revision: int
    more: bool
    """Whether there are keys beyond the last one."""


@dataclass(frozen=True)
class Changed:
    """The keys of a range that were put since an earlier revision."""

    kvs: list[KeyValue]
    total: int
    """Number of all keys of the range."""
    more: bool
    """Whether there are further ones that were put."""


@dataclass(frozen=True)
class ChangedRanges:
    """What was put in several ranges, all as of ``revision``."""

    ranges: list[Changed]
    kvs: list[KeyValue]
    """The single keys that there are, changed or not."""
    revision: int


@dataclass(frozen=True)
class MemberStatus:
    """One etcd member's report about itself; ``error`` is set when it did not answer or is cut off from the others."""

    endpoint: str
    version: str = ""
    is_leader: bool = False
    db_bytes: int = 0
    """Size of its database file, which its quota limits."""
    db_in_use_bytes: int = 0
    """How much of that a defragmentation would leave."""
    quota_bytes: int = 0
    """The member's ``--quota-backend-bytes``; 0 if unknown."""
    error: str = ""
    alarms: Sequence[str] = ()
    """Alarms that it raised, such as NOSPACE: then the cluster accepts no writes."""


@dataclass(frozen=True)
class ClusterMember:
    """A member in etcd's own list."""

    id: int
    name: str
    """Empty until it has started for the first time."""
    peer_urls: Sequence[str]
    client_urls: Sequence[str]
    is_learner: bool = False
    """Whether it has no vote yet."""

    @classmethod
    def from_message(cls, message: Any) -> Self:
        return cls(message.ID, message.name, tuple(message.peerURLs), tuple(message.clientURLs), message.isLearner)


class EtcdClient:
    """A connection to an etcd cluster. Synchronous, and safe to share between threads; not between processes.

    Reads are linearizable. Every write happens exactly once, or raises: OutcomeUnknown when it may have happened,
    EtcdUnavailable (its base) when it did not, EtcdRefused when etcd decided against it. Two kinds of
    EtcdUnavailable are raised at once, without retries: EtcdDenied and EtcdFull.
    """

    def __init__(self, endpoints: Sequence[str], *, call_timeout_s: float = 0.5, retry_budget_s: float = 15.0,
                 access: Access | None = None, follow_members_s: float = 0.0) -> None:
        """``endpoints`` are ``host:port``. Connects lazily; ``get`` something to see whether etcd is there.
        ``follow_members_s``: as for ``Channels``."""
        self._channels = Channels(endpoints, call_timeout_s=call_timeout_s, retry_budget_s=retry_budget_s,
                                  access=access, follow_members_s=follow_members_s)
        self._access = access or Access()
        self._deduplicator = WriteDeduplicator(self._channels)
        self._quotas = QuotaReader(self._access, timeout_s=call_timeout_s)

    @classmethod
    def from_config(cls, cfg: EtcdConfig, endpoints: Sequence[str], *, retry_budget_s: float | None = None) -> Self:
        """A client with the certificates and the user of the settings. The members of a cluster's own etcd come and go
        with its hosts, and are followed. Raises ConfigError."""
        return cls(endpoints, call_timeout_s=cfg.call_timeout_s, access=Access.from_config(cfg),
                   follow_members_s=cfg.follow_members_s if not cfg.endpoints else 0.0,
                   retry_budget_s=cfg.retry_budget_s if retry_budget_s is None else retry_budget_s)

    @property
    def endpoints(self) -> list[str]:
        return list(self._channels.endpoints)

    @property
    def endpoint(self) -> str:
        """The member that calls go to now."""
        return self._channels.current

    # -- reads ---------------------------------------------------------------------------------------------------------
    def get(self, key: str) -> KeyValue | None:
        kvs = self._channels.call(RANGE, pb.RangeRequest(key=key.encode())).kvs
        return KeyValue.from_message(kvs[0]) if kvs else None

    def revision(self) -> int:
        """Revision of etcd now."""
        return int(self._channels.call(RANGE, pb.RangeRequest(key=b"/", count_only=True)).header.revision)

    def range(self, prefix: str, *, limit: int = 0, newest_first: bool = False, revision: int = 0
              ) -> tuple[list[KeyValue], int]:
        """Keys under a prefix in key order, as of one revision, and that revision. ``limit`` 0 means all, ``revision``
        0 the present.

        ``watch(prefix, start_revision=revision + 1)`` continues from there without a gap. A large range is read in
        pages; a caller that need not hold it whole iterates ``pages`` instead. ``newest_first``, which needs a limit:
        the keys that were created last, the last one first; etcd then reads every key. Raises Compacted when
        compactions overtook every try to read the range, or the given revision.
        """
        if newest_first:
            if not limit:
                raise ValueError("the newest keys of a range are read with a limit")
            request = _range_request(prefix, limit=limit, sort_order=pb.RangeRequest.DESCEND,
                                     sort_target=pb.RangeRequest.CREATE, revision=revision)
            newest = self._read_page(request)
            return newest.kvs, newest.revision
        for attempt in itertools.count(1):
            kvs, read_at = list[KeyValue](), 0
            try:
                for page in self.pages(prefix, limit=limit, revision=revision):
                    kvs += page.kvs
                    read_at = page.revision
                return kvs, read_at
            except Compacted:
                if revision or attempt == _MAX_RANGE_READS:
                    raise
        raise AssertionError("unreachable")

    def pages(self, prefix: str, *, after: str = "", before: str = "", limit: int = 0, revision: int = 0
              ) -> Iterator[Page]:
        """Keys under a prefix in key order, between the keys ``after`` and ``before``, all as of one revision, in pages
        of about 1 MiB. At least one page, which may be empty. ``limit``: the most keys on all pages together; 0:
        none. ``revision`` 0 is the present.

        Raises Compacted between pages when that revision was compacted meanwhile: start over.
        """
        size, left = _FIRST_PAGE, limit or sys.maxsize
        while True:
            page = self.page(prefix, limit=min(size, left), after=after, before=before, revision=revision)
            left -= len(page.kvs)
            yield page
            if not page.more or not page.kvs or not left:
                return
            after, revision = page.kvs[-1].key, page.revision
            nbytes = sum(len(kv.key) + len(kv.value) for kv in page.kvs)
            size = min(max(1, _PAGE_BYTES * len(page.kvs) // nbytes), _MAX_PAGE)

    def page(self, prefix: str, *, limit: int, after: str = "", before: str = "", newest_first: bool = False,
             revision: int = 0) -> Page:
        """The first ``limit`` keys under a prefix in key order, or in reverse, between the keys ``after`` and
        ``before``; fewer only where there are no more.

        In reverse order etcd reads every key between them. ``revision`` 0 is the present. Raises Compacted for one
        that is no longer kept.
        """
        kvs, size = list[KeyValue](), limit
        while True:
            request = _range_request(prefix, after, before, limit=min(size, limit - len(kvs)), revision=revision)
            if newest_first:
                request.sort_order, request.sort_target = pb.RangeRequest.DESCEND, pb.RangeRequest.KEY
            found = self._read_page(request)
            kvs, size, revision = kvs + found.kvs, 2 * len(found.kvs), found.revision
            if not found.more or not found.kvs or len(kvs) >= limit:
                return Page(kvs, revision, found.more)
            after, before = (after, kvs[-1].key) if newest_first else (kvs[-1].key, before)

    def _read_page(self, request: Any) -> Page:
        """Reads a page. Its deadline grows with the number of keys requested; one that misses it is requested again,
        smaller, so there may be fewer keys than requested and ``more`` of them."""
        expected_s = request.limit * _KEY_BYTES / _RANGE_BYTES_PER_S
        response = self._channels.call(RANGE, request, timeout_s=self._channels.call_timeout_s + expected_s,
                                       max_timeout_s=_MAX_RANGE_TIMEOUT_S, on_timeout=_shrink)
        return Page([KeyValue.from_message(kv) for kv in response.kvs],
                    request.revision or response.header.revision, response.more)

    def keys(self, prefix: str) -> Iterator[str]:
        """The keys under a prefix in key order, without their values. They are read in pages, each of them as of the
        time that it is read."""
        after, more = "", True
        while more:
            page = self._read_page(_range_request(prefix, after, limit=_MAX_PAGE, keys_only=True))
            yield from (kv.key for kv in page.kvs)
            more = page.more and bool(page.kvs)
            after = page.kvs[-1].key if page.kvs else ""

    def count(self, prefix: str, *, after: str = "", before: str = "") -> int:
        """Number of keys under a prefix, between two of them."""
        return int(self._channels.call(RANGE, _range_request(prefix, after, before, count_only=True)).count)

    def changed(self, prefixes: Sequence[str], keys: Sequence[str] = (), *, since: int, limit: int) -> ChangedRanges:
        """At most ``limit`` of the keys under each prefix that were put after revision ``since``, in any order, and the
        single ``keys``, in one transaction. A key that was deleted is not among them; ``total`` tells. etcd looks at
        every key of the ranges and sends these alone."""
        ranges = [_range_request(prefix, limit=limit, min_mod_revision=since + 1) for prefix in prefixes]
        gets = [Op.get(key).to_message() for key in keys]
        response = self._channels.call(TXN, pb.TxnRequest(
            success=[*(pb.RequestOp(request_range=request) for request in ranges), *gets]),
            timeout_s=self._channels.call_timeout_s + _RANGE_EXTRA_S)
        answers = [step.response_range for step in response.responses]
        return ChangedRanges(
            [Changed([KeyValue.from_message(kv) for kv in a.kvs], a.count, a.more) for a in answers[:len(ranges)]],
            [KeyValue.from_message(kv) for a in answers[len(ranges):] for kv in a.kvs], response.header.revision)

    # -- writes --------------------------------------------------------------------------------------------------------
    def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """Writes one key unconditionally and returns the revision. Raises LeaseLost."""
        return self.txn((), (Op.put(key, value, lease),)).revision

    def delete(self, key: str) -> bool:
        """Deletes one key. Returns whether it existed; True also when that part of the answer was lost."""
        return self.txn((), (Op.delete(key),)).deleted != 0

    def delete_prefix(self, prefix: str) -> int:
        """Deletes every key under a prefix and returns how many there were."""
        there = self.count(prefix)
        deleted = self.txn((), (Op.delete_prefix(prefix),)).deleted
        return there if deleted is None else deleted

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()) -> TxnResult:
        """Runs ``then`` if every comparison holds, else ``orelse``, which only reads; atomically and exactly once."""
        if any(op.writes for op in orelse):
            raise ValueError("the operations for failed comparisons may only read")
        if any(op.writes for op in then):
            return self._deduplicator.run(compares, then, orelse)
        response = self._channels.call(TXN, pb.TxnRequest(
            compare=[c.to_message() for c in compares], success=[op.to_message() for op in then],
            failure=[op.to_message() for op in orelse]))
        return result(response.succeeded, response.responses, response.header.revision)

    def update(self, key: str, change: Callable[[bytes | None], bytes | None], *, lease: int = 0,
               guards: Sequence[Compare] = ()) -> bytes | None:
        """Replaces a value by ``change(value)``, which is called again after a concurrent modification.

        None stands for an absent key, in both directions. Returns the new value. Raises Fenced when a guard does not
        hold, Conflict when every try met a concurrent modification.
        """
        written = self.update_from(self.get(key), key, change, lease=lease, guards=guards)
        return written.value if written is not None else None

    def update_from(self, current: KeyValue | None, key: str, change: Callable[[bytes | None], bytes | None], *,
                    lease: int = 0, guards: Sequence[Compare] = ()) -> KeyValue | None:
        """Changes a key as ``update`` does, without reading it first: ``current`` is the key as the caller has seen it
        last, which may be outdated. Returns the key as it is now."""
        for _ in range(_MAX_UPDATES):
            new = change(current.value if current else None)
            if current is None and new is None and not guards:
                return None
            revision = current.mod_revision if current else 0
            ops = [Op.put(key, new, lease)] if new is not None else [Op.delete(key)]
            outcome = self.txn([Compare.mod(key, "==", revision), *guards], ops, [Op.get(key)])
            if outcome.succeeded:
                return None if new is None else KeyValue(
                    key, new, current.create_revision if current else outcome.revision, outcome.revision,
                    current.version + 1 if current else 1, lease)
            current = outcome.get(key)
            if (current.mod_revision if current else 0) == revision:
                raise Fenced(f"the update of {key} was refused: its fencing token no longer holds")
        raise Conflict(f"{key} was modified concurrently in each of {_MAX_UPDATES} tries to update it")

    # -- leases and watches --------------------------------------------------------------------------------------------
    def grant(self, ttl_s: int) -> int:
        """A new lease that ends ``ttl_s`` seconds after its last keep-alive; its keys end with it."""
        return leases.grant(self._channels, ttl_s)

    def revoke(self, lease: int) -> None:
        """Ends a lease now; one that has ended already is fine."""
        leases.revoke(self._channels, lease)

    def keepalive(self, ttl_s: int) -> KeptLease:
        """A new lease that a background thread keeps alive until it is closed or lost."""
        granted_at = boottime_s()
        return KeptLease(self._channels, leases.grant(self._channels, ttl_s), ttl_s, granted_at=granted_at)

    def lease_left(self, lease: int) -> int:
        """Whole seconds until a lease expires without a keep-alive; 0 when it has ended."""
        return max(0, int(self._channels.call(TIME_TO_LIVE, pb.LeaseTimeToLiveRequest(ID=lease)).TTL))

    def watch(self, prefix: str, *, start_revision: int) -> Watch:
        """Changes under a prefix from ``start_revision`` on, each once and in order, across failures of members."""
        return Watch(self._channels, prefix, start_revision)

    # -- maintenance ---------------------------------------------------------------------------------------------------
    def compact(self, revision: int, *, wait_s: float = 0.0) -> None:
        """Discards what keys were before ``revision``; watches from earlier revisions then raise Compacted.

        A revision that is already compacted is fine. ``wait_s``: how long to wait until the space is
        freed inside the database; 0: not at all. Raises EtcdUnavailable; EtcdRefused for a revision of the future.
        """
        request = pb.CompactionRequest(revision=revision, physical=wait_s > 0)
        with contextlib.suppress(Compacted):
            self._channels.call(COMPACT, request, timeout_s=max(self._channels.call_timeout_s, wait_s))

    def statuses(self) -> list[MemberStatus]:
        """Every member's report about itself; each is asked once."""
        out = []
        for endpoint in self._channels.endpoints:
            try:
                s = self._channels.attempt(STATUS, pb.StatusRequest(), endpoint)
                out.append(MemberStatus(
                    endpoint, s.version, s.leader == s.header.member_id, s.dbSize, s.dbSizeInUse,
                    s.dbSizeQuota or self._quotas.quota_bytes(endpoint),
                    error="" if s.leader else "it knows no leader", alarms=_alarms(s.errors, s.header.member_id)))
            except AttemptFailed as e:
                out.append(MemberStatus(endpoint, error=str(e)))
            except EtcdDenied as e:
                out.append(MemberStatus(endpoint, error=e.message))
        return out

    def defragment(self, member: MemberStatus, *, timeout_s: float) -> None:
        """Rewrites a member's database file without free space. The member answers nothing meanwhile, for a time that
        grows with the space in use. Raises EtcdDenied where the user is not etcd's root, EtcdUnavailable."""
        try:
            self._channels.attempt(DEFRAGMENT, pb.DefragmentRequest(), member.endpoint, timeout_s=timeout_s)
        except AttemptFailed as e:
            if e.failure is Failure.REFUSED:
                raise refusal(e.code, e.details) from e
            raise EtcdUnavailable(f"etcd member {member.endpoint} did not answer: {e}") from e

    def disarm_no_space(self) -> None:
        """Ends the NOSPACE alarms of all members; one that exceeds its quota again raises it again. Raises as
        ``defragment``."""
        raised = self._channels.call(ALARM, pb.AlarmRequest(action=pb.AlarmRequest.GET)).alarms
        for alarm in (a for a in raised if a.alarm == pb.NOSPACE):
            self._channels.call(ALARM, pb.AlarmRequest(action=pb.AlarmRequest.DEACTIVATE, memberID=alarm.memberID,
                                                       alarm=pb.NOSPACE))

    # -- members -------------------------------------------------------------------------------------------------------
    def members(self) -> list[ClusterMember]:
        """The members of etcd now. Raises EtcdUnavailable."""
        self.revision()  # etcd 3.4 answers with what the member that is asked has, which is as new as this then
        found = self._channels.call(MEMBER_LIST, pb.MemberListRequest(linearizable=True)).members
        self._channels.take_members(found)
        return [ClusterMember.from_message(m) for m in found]

    def add_learner(self, peer_url: str) -> tuple[ClusterMember, list[ClusterMember]]:
        """Adds a member that has no vote until ``promote``; it is to be started with the members that are returned
        with it. Raises EtcdRefused where there is another learner, or one at this URL, and EtcdUnavailable: then it
        may have been added."""
        answer = self._channels.call(MEMBER_ADD, pb.MemberAddRequest(peerURLs=[peer_url], isLearner=True),
                                     timeout_s=_RECONFIGURE_S)
        return ClusterMember.from_message(answer.member), [ClusterMember.from_message(m) for m in answer.members]

    def promote(self, member: int) -> None:
        """Gives a learner its vote. Raises EtcdRefused while it has not caught up, and EtcdUnavailable."""
        self._channels.call(MEMBER_PROMOTE, pb.MemberPromoteRequest(ID=member), timeout_s=_RECONFIGURE_S)

    def set_peer_url(self, member: int, url: str) -> None:
        """Tells the others where a member listens for them. Raises EtcdRefused, and EtcdUnavailable."""
        self._channels.call(MEMBER_UPDATE, pb.MemberUpdateRequest(ID=member, peerURLs=[url]), timeout_s=_RECONFIGURE_S)

    def remove_member(self, member: int) -> None:
        """Removes a member for good: its data are of no use any more. No error where there is none. Raises EtcdRefused
        where the others were no majority then, and EtcdUnavailable."""
        try:
            self._channels.call(MEMBER_REMOVE, pb.MemberRemoveRequest(ID=member), timeout_s=_RECONFIGURE_S)
        except EtcdRefused as e:
            if "member not found" not in e.message:
                raise

    def close(self) -> None:
        """Deletes this client's write tokens and closes the connections; open watches and leases end with it."""
        if not self._channels.closed.is_set():
            self._deduplicator.close()
            self._channels.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _alarms(errors: Sequence[str], member_id: int) -> tuple[str, ...]:
    """Names of the alarms of one member among a status's errors: each member lists those of all, as
    ``memberID:… alarm:NAME``."""
    found = (re.fullmatch(r"memberID:(\d+) alarm:(\w+)", error.strip()) for error in errors)
    return tuple(match[2] for match in found if match and int(match[1]) == member_id)


def _range_request(prefix: str, after: str = "", before: str = "", **options: Any) -> Any:
    """A request for the keys under a prefix, between the keys ``after`` and ``before`` where they are given."""
    return pb.RangeRequest(key=after.encode() + b"\0" if after else prefix.encode() or b"\0",
                           range_end=before.encode() if before else range_end(prefix), **options)


def _shrink(request: Any) -> None:
    """What to ask for after a page that did not arrive in time."""
    if request.limit:
        request.limit = max(1, request.limit // 4)
