"""Exactly-once transactions: each write leaves a token, and is conditional on the token that was there before.

A request whose answer was lost may have been applied, or may be applied later, when a stopped member goes on. So every
writing transaction T of a slot, "if its comparisons hold, write", is sent as

    if mod_revision(token) == what this slot left there last, and T's comparisons hold:
        write, and put a new token
    else:
        read the token

The same request can then be sent any number of times, to any member: it takes effect at most once, a late copy of it
fails its condition, and when the answer was lost the token tells that it ran, and when. One thing is left: comparisons
that did not hold in the copy that was answered may hold when a late one arrives. So when a late one is possible, the
token is moved on before "no" is said.
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
from elastic_rl.etcd import keys
from elastic_rl.etcd.channels import GRANT, RANGE, REVOKE, TXN, Ambiguity, Channels
from elastic_rl.etcd.pb import etcd_pb2 as pb
from elastic_rl.etcd.transaction import Compare, Op, TxnResult, result

_LEASE_TTL_S = 600
_RENEW_AFTER_S = 200
"""A slot that rested longer is not used again and a lease that is older is replaced: so a token outlives its use."""
_RAN, _CLOSED = b"+", b"-"


@dataclass
class Slot:
    """One token key. Used by one transaction at a time."""

    key: str
    left_at: int = 0
    """Revision at which this slot's token was last written; 0 before the first."""
    used_at: float = 0.0


def wrap(slot: Slot, token: bytes, lease: int, compares: Sequence[Compare], then: Sequence[Op],
         orelse: Sequence[Op]) -> Any:
    """The request that runs the given transaction at most once. ``orelse`` only reads."""
    writes = [*(op.message() for op in then), Op.put(slot.key, token + _RAN, lease).message()]
    if not any(op.kind == "put" for op in then):
        writes = [_hidden(writes)]
    return pb.TxnRequest(
        compare=[Compare.mod(slot.key, "==", slot.left_at).message(), *(c.message() for c in compares)],
        success=writes, failure=[Op.get(slot.key).message(), *(op.message() for op in orelse)])


def close(slot: Slot, token: bytes, lease: int) -> Any:
    """The request after which no copy of the token's transaction can run any more, unless one did."""
    return pb.TxnRequest(compare=[Compare.mod(slot.key, "==", slot.left_at).message()],
                         success=[_hidden([Op.put(slot.key, token + _CLOSED, lease).message()])],
                         failure=[Op.get(slot.key).message()])


def _hidden(writes: list[Any]) -> Any:
    """The same writes, which etcd does not count against its quota: it looks at puts that are not nested only. So keys
    can be deleted from a full database; whatever puts a key is counted."""
    return pb.RequestOp(request_txn=pb.TxnRequest(success=writes))


class WriteDeduplicator:
    """Slots of one client and the lease that cleans them up. Thread-safe."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._client = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._made = 0
        self._lease, self._granted_at = 0, 0.0

    def run(self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op]) -> TxnResult:
        """Runs a transaction that may write, exactly once. ``orelse`` only reads.

        Raises OutcomeUnknown when no member told within the budget whether it ran; EtcdUnavailable when it did not
        run; LeaseLost when a put named a lease that is gone; EtcdRefused.
        """
        slot, token, doubt = self._take(), secrets.token_bytes(12), Ambiguity()
        try:
            request = wrap(slot, token, self._token_lease(), compares, then, orelse)
            response = self._channels.call(TXN, request, doubt=doubt)
        except LeaseLost:
            # Perhaps the tokens' own lease (an etcd restored from a backup). The slot and so the guard stay the same.
            request = wrap(slot, token, self._token_lease(renew=True), compares, then, orelse)
            response = self._channels.call(TXN, request, doubt=doubt)
        except EtcdFull:
            # The transaction over which the quota was passed is both applied and refused.
            found = self._channels.call(RANGE, Op.get(slot.key).message().request_range).kvs
            if not found or found[0].value != token + _RAN:
                raise
            outcome = self._ran(slot, found[0].mod_revision, then)
            self._give(slot)
            return outcome
        outcome = self._read(slot, token, response, then, doubt)
        self._give(slot)  # not after an error: a late copy may still move the token
        return outcome

    def _read(self, slot: Slot, token: bytes, response: Any, then: Sequence[Op], doubt: Ambiguity) -> TxnResult:
        if response.succeeded:
            slot.left_at = response.header.revision
            nested = response.responses[0].HasField("response_txn")
            answered = response.responses[0].response_txn if nested else response
            return result(True, answered.responses, slot.left_at)
        found = _token_in(response)
        if found.mod_revision == slot.left_at:
            refused = result(False, response.responses[1:], response.header.revision)
            if not doubt.any:
                return refused
            closed = self._channels.call(TXN, close(slot, token, self._token_lease()), doubt=doubt)
            if closed.succeeded:
                slot.left_at = closed.header.revision
                return refused
            found = _token_in(closed)
            if found.value == token + _CLOSED:
                slot.left_at = found.mod_revision
                return refused
        if found.value != token + _RAN:
            raise OutcomeUnknown(f"the token at {slot.key} is not ours any more",
                                 hint="something else writes or deletes keys under /elastic_rl/_tokens")
        return self._ran(slot, found.mod_revision, then)

    def _ran(self, slot: Slot, revision: int, then: Sequence[Op]) -> TxnResult:
        """What a transaction did of which only its token told, at that revision."""
        slot.left_at = revision
        gets = [op.message().request_range for op in then if not op.writes]
        for get in gets:
            get.revision = revision
        ranges = [pb.ResponseOp(response_range=self._channels.call(RANGE, get)) for get in gets]
        outcome = result(True, ranges, revision)
        return TxnResult(True, outcome.revision, outcome.kvs, deleted=None)

    def _take(self) -> Slot:
        with self._lock:
            while self._free:
                slot = self._free.pop()
                if time.monotonic() - slot.used_at < _RENEW_AFTER_S:
                    return slot
            self._made += 1
            return Slot(keys.token(self._client, self._made))

    def _give(self, slot: Slot) -> None:
        slot.used_at = time.monotonic()
        with self._lock:
            self._free.append(slot)

    def _token_lease(self, *, renew: bool = False) -> int:
        with self._lock:
            now = time.monotonic()
            if renew or not self._lease or now - self._granted_at > _RENEW_AFTER_S:
                self._lease = grant(self._channels, _LEASE_TTL_S)
                self._granted_at = now
            return self._lease

    def close(self) -> None:
        """Gives the tokens back, in a short bounded time; those that cannot be reached go with their lease."""
        if self._lease:
            with contextlib.suppress(EtcdUnavailable, EtcdRefused):
                revoke(self._channels, self._lease, budget_s=0.0)


def _token_in(response: Any) -> Any:
    """The token that a failed request found; an empty one with revision 0 when there is none."""
    kvs = response.responses[0].response_range.kvs
    return kvs[0] if kvs else pb.KeyValue()


def grant(channels: Channels, ttl_s: int) -> int:
    """A new lease. We choose the number, so that asking twice gives one lease."""
    lease = secrets.randbits(62) | 1
    try:
        channels.call(GRANT, pb.LeaseGrantRequest(TTL=ttl_s, ID=lease))
    except EtcdRefused as e:
        if "already exists" not in e.message:
            raise
    return lease


def revoke(channels: Channels, lease: int, *, budget_s: float | None = None) -> None:
    """Ends a lease and deletes its keys; one that is gone is fine."""
    with contextlib.suppress(LeaseLost):
        channels.call(REVOKE, pb.LeaseRevokeRequest(ID=lease), budget_s=budget_s)
