"""Exactly-once transactions: each write leaves a token, and is conditional on the token that was there before.

A request whose answer was lost may have been applied, or may be applied later, when a stopped member resumes. So every
writing transaction T of a slot, "if its comparisons hold, write", is sent as

    if mod_revision(token) == the revision of this slot's last write, and T's comparisons hold:
        write, and put a new token
    else:
        read the token

The same request can then be sent any number of times, to any member: it takes effect at most once, a late copy of it
fails its condition, and when the answer was lost the token shows that it ran, and when. One case is left: comparisons
that did not hold in the copy that was answered may hold when a late one arrives. So when a late copy is possible, the
token is voided before the transaction is reported as not applied.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elastic_rl.errors import EtcdFull, EtcdRefused, EtcdUnavailable, LeaseLost, OutcomeUnknown
from elastic_rl.etcd import keys, leases
from elastic_rl.etcd.channels import RANGE, TXN, Ambiguity, Channels
from elastic_rl.etcd.pb import etcd_pb2 as pb
from elastic_rl.etcd.transaction import Compare, Op, TxnResult, result

_LEASE_TTL_S = 600
_MAX_AGE_S = 200.0
"""A slot that was idle for longer is not used again, and an older lease is replaced: so a token outlives its use."""
_APPLIED, _VOID = b"+", b"-"


@dataclass
class Slot:
    """One token key. Used by one transaction at a time."""

    key: str
    revision: int = 0
    """Revision of this slot's last write of the token; 0 before the first."""
    used_at: float = 0.0
    """Monotonic."""


def write_request(slot: Slot, token: bytes, lease: int, compares: Sequence[Compare], then: Sequence[Op],
                  orelse: Sequence[Op]) -> Any:
    """The request that runs the given transaction at most once. ``orelse`` only reads."""
    writes = [*(op.to_message() for op in then), Op.put(slot.key, token + _APPLIED, lease).to_message()]
    if not any(op.kind == "put" for op in then):
        writes = [_outside_quota(writes)]
    return pb.TxnRequest(
        compare=[Compare.mod(slot.key, "==", slot.revision).to_message(), *(c.to_message() for c in compares)],
        success=writes, failure=[Op.get(slot.key).to_message(), *(op.to_message() for op in orelse)])


def void_request(slot: Slot, token: bytes, lease: int) -> Any:
    """The request after which no copy of the token's transaction can run any more, unless one did."""
    return pb.TxnRequest(compare=[Compare.mod(slot.key, "==", slot.revision).to_message()],
                         success=[_outside_quota([Op.put(slot.key, token + _VOID, lease).to_message()])],
                         failure=[Op.get(slot.key).to_message()])


def _outside_quota(writes: list[Any]) -> Any:
    """The same writes, which etcd does not count against its quota, since it counts only puts that are not nested. So
    keys can be deleted from a full database."""
    return pb.RequestOp(request_txn=pb.TxnRequest(success=writes))


class WriteDeduplicator:
    """Slots of one client, and the lease that cleans them up. Thread-safe."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._client = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._created = 0
        self._lease, self._lease_at = 0, 0.0

    def run(self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op]) -> TxnResult:
        """Runs a transaction that may write, exactly once. ``orelse`` only reads.

        Raises OutcomeUnknown when no member answered within the budget whether it ran; EtcdUnavailable when it did not
        run; LeaseLost when a put named a lease that has ended; EtcdRefused.
        """
        slot, token, ambiguity = self._acquire(), secrets.token_bytes(12), Ambiguity()
        try:
            request = write_request(slot, token, self._token_lease(), compares, then, orelse)
            response = self._channels.call(TXN, request, ambiguity=ambiguity)
        except LeaseLost:
            # Perhaps the tokens' own lease (an etcd restored from a backup). The slot and so the guard stay the same.
            request = write_request(slot, token, self._token_lease(replace=True), compares, then, orelse)
            response = self._channels.call(TXN, request, ambiguity=ambiguity)
        except EtcdFull:
            # The transaction that exceeds the quota is both applied and refused.
            found = self._channels.call(RANGE, Op.get(slot.key).to_message().request_range).kvs
            if not found or found[0].value != token + _APPLIED:
                raise
            outcome = self._applied(slot, found[0].mod_revision, then)
            self._release(slot)
            return outcome
        outcome = self._outcome(slot, token, response, then, ambiguity)
        self._release(slot)  # not after an error: a late copy may still change the token
        return outcome

    def _outcome(self, slot: Slot, token: bytes, response: Any, then: Sequence[Op], ambiguity: Ambiguity) -> TxnResult:
        if response.succeeded:
            slot.revision = response.header.revision
            nested = response.responses[0].HasField("response_txn")
            answered = response.responses[0].response_txn if nested else response
            return result(True, answered.responses, slot.revision)
        found = _token_in(response)
        if found.mod_revision == slot.revision:
            refused = result(False, response.responses[1:], response.header.revision)
            if not ambiguity.any:
                return refused
            voided = self._channels.call(TXN, void_request(slot, token, self._token_lease()), ambiguity=ambiguity)
            if voided.succeeded:
                slot.revision = voided.header.revision
                return refused
            found = _token_in(voided)
            if found.value == token + _VOID:
                slot.revision = found.mod_revision
                return refused
        if found.value != token + _APPLIED:
            raise OutcomeUnknown(f"the write token at {slot.key} was changed by another process",
                                 hint="something else writes or deletes keys under /elastic_rl/_tokens")
        return self._applied(slot, found.mod_revision, then)

    def _applied(self, slot: Slot, revision: int, then: Sequence[Op]) -> TxnResult:
        """The outcome of a transaction that ran at ``revision``, as only its token shows."""
        slot.revision = revision
        gets = [op.to_message().request_range for op in then if not op.writes]
        for get in gets:
            get.revision = revision
        ranges = [pb.ResponseOp(response_range=self._channels.call(RANGE, get)) for get in gets]
        outcome = result(True, ranges, revision)
        return TxnResult(True, outcome.revision, outcome.kvs, deleted=None)

    def _acquire(self) -> Slot:
        with self._lock:
            while self._free:
                slot = self._free.pop()
                if time.monotonic() - slot.used_at < _MAX_AGE_S:
                    return slot
            self._created += 1
            return Slot(keys.write_token(self._client, self._created))

    def _release(self, slot: Slot) -> None:
        slot.used_at = time.monotonic()
        with self._lock:
            self._free.append(slot)

    def _token_lease(self, *, replace: bool = False) -> int:
        with self._lock:
            now = time.monotonic()
            if replace or not self._lease or now - self._lease_at > _MAX_AGE_S:
                try:
                    self._lease = leases.grant(self._channels, _LEASE_TTL_S)
                except EtcdFull:
                    # A full etcd grants no lease, and keys must be deleted for it to have room again.
                    if replace or not self._lease or not self._renew():
                        raise
                self._lease_at = now
            return self._lease

    def _renew(self) -> bool:
        """Extends the present lease; whether a member knows it."""
        current = self._channels.current
        others = (member for member in self._channels.endpoints if member != current)
        return any(leases.renew(self._channels, self._lease, member, timeout_s=self._channels.call_timeout_s)
                   for member in (current, *others))

    def close(self) -> None:
        """Deletes the tokens, within a short bounded time; those that cannot be deleted end with their lease."""
        if self._lease:
            with contextlib.suppress(EtcdUnavailable, EtcdRefused):
                leases.revoke(self._channels, self._lease, budget_s=0.0)


def _token_in(response: Any) -> Any:
    """The token that a failed request found; an empty one with revision 0 when there is none."""
    kvs = response.responses[0].response_range.kvs
    return kvs[0] if kvs else pb.KeyValue()
