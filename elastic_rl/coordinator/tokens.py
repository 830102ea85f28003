"""Exactly-once transactions: each write leaves a token, and is conditional on the token that was there before.

A request whose answer was lost may have been applied, or may be applied later, when a stopped member goes on. So every
writing transaction T of a slot is wrapped as

    if mod_revision(token) == what this slot left there last:  run T, and put a new token in the branch that wrote
    else:                                                      read the token

The same request can then be sent any number of times, to any member: it takes effect at most once, a late copy of it
fails its condition, and when the answer was lost the token tells that it ran, when, and which branch.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elastic_rl.coordinator import keys
from elastic_rl.coordinator.channels import GRANT, RANGE, REVOKE, TXN, Channels
from elastic_rl.coordinator.etcdpb import etcd_pb2 as pb
from elastic_rl.coordinator.ops import Compare, Op, TxnResult, result
from elastic_rl.errors import LeaseLost, OutcomeUnknown, StoreRefused, StoreUnavailable

_LEASE_TTL_S = 600
_RENEW_AFTER_S = 200
"""A slot that rested longer is not used again and a lease that is older is replaced: so a token outlives its use."""
_THEN, _ELSE = b"+", b"-"


@dataclass
class Slot:
    """One token key. Used by one transaction at a time."""

    key: str
    left_at: int = 0
    """Revision at which this slot's token was last written; 0 before the first."""
    used_at: float = 0.0


def wrap(slot: Slot, token: bytes, lease: int, compares: Sequence[Compare], then: Sequence[Op],
         orelse: Sequence[Op]) -> Any:
    """The request that runs the given transaction at most once. A branch without writes leaves no token."""
    def branch(ops: Sequence[Op], mark: bytes) -> list[Any]:
        out = [op.message() for op in ops]
        if any(op.writes for op in ops):
            out.append(Op.put(slot.key, token + mark, lease).message())
        return out

    inner = pb.TxnRequest(compare=[c.message() for c in compares], success=branch(then, _THEN),
                          failure=branch(orelse, _ELSE))
    return pb.TxnRequest(compare=[Compare.mod(slot.key, "==", slot.left_at).message()],
                         success=[pb.RequestOp(request_txn=inner)], failure=[Op.get(slot.key).message()])


class TokenBook:
    """Slots of one client and the lease that cleans them up. Thread-safe."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._client = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._made = 0
        self._lease, self._granted_at = 0, 0.0

    def run(self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op]) -> TxnResult:
        """Runs a transaction that may write, exactly once.

        Raises OutcomeUnknown when no member told within the budget whether it ran; StoreUnavailable when it did not
        run; LeaseLost when a put named a lease that is gone; StoreRefused.
        """
        slot = self._take()
        token = secrets.token_bytes(12)
        try:
            request = wrap(slot, token, self._token_lease(), compares, then, orelse)
            response = self._channels.call(TXN, request, writes=True)
        except LeaseLost:
            # Perhaps the tokens' own lease (an etcd restored from a backup). The slot and so the guard stay the same.
            request = wrap(slot, token, self._token_lease(renew=True), compares, then, orelse)
            response = self._channels.call(TXN, request, writes=True)
        outcome = self._read(slot, token, response, then, orelse)
        self._give(slot)  # not after an error: a late copy may still move the token
        return outcome

    def _read(self, slot: Slot, token: bytes, response: Any, then: Sequence[Op], orelse: Sequence[Op]) -> TxnResult:
        if response.succeeded:
            outcome = result(response.responses[0].response_txn, response.header.revision)
            if any(op.writes for op in (then if outcome.succeeded else orelse)):
                slot.left_at = response.header.revision
            return outcome
        found = response.responses[0].response_range.kvs
        if not found or not found[0].value.startswith(token):
            raise OutcomeUnknown(f"the token at {slot.key} is not ours any more",
                                 hint="something else writes or deletes keys under /elastic_rl/_tokens")
        succeeded = found[0].value.endswith(_THEN)
        slot.left_at = found[0].mod_revision
        gets = [op.message().request_range for op in (then if succeeded else orelse) if not op.writes]
        for get in gets:
            get.revision = slot.left_at
        ranges = [self._channels.call(RANGE, get) for get in gets]
        inner = pb.TxnResponse(succeeded=succeeded, responses=[pb.ResponseOp(response_range=r) for r in ranges])
        outcome = result(inner, slot.left_at)
        return TxnResult(outcome.succeeded, outcome.revision, outcome.kvs, deleted=None)

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
            with contextlib.suppress(StoreUnavailable, StoreRefused):
                revoke(self._channels, self._lease, budget_s=0.0)


def grant(channels: Channels, ttl_s: int) -> int:
    """A new lease. We choose the number, so that asking twice gives one lease."""
    lease = secrets.randbits(62) | 1
    try:
        channels.call(GRANT, pb.LeaseGrantRequest(TTL=ttl_s, ID=lease))
    except StoreRefused as e:
        if "already exists" not in e.message:
            raise
    return lease


def revoke(channels: Channels, lease: int, *, budget_s: float | None = None) -> None:
    """Ends a lease and deletes its keys; one that is gone is fine."""
    with contextlib.suppress(LeaseLost):
        channels.call(REVOKE, pb.LeaseRevokeRequest(ID=lease), budget_s=budget_s)
