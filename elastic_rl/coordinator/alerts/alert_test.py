"""``alerts test``: a notice that goes the way of every alert, to each receiver, and what became of it.

The test is an alert in etcd, which the leader delivers and forgets some minutes later; so it may be asked for, and its
result read, on any replica.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from enum import StrEnum

from pydantic import BaseModel

from elastic_rl.config import AlertConfig
from elastic_rl.coordinator.alerts import receivers, state_machine
from elastic_rl.coordinator.alerts.delivery import ReceiverQueue
from elastic_rl.coordinator.alerts.state_machine import Alert, Phase
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.operations.service import IdempotencyClaim
from elastic_rl.coordinator.problems import Problem, no_leader, not_found
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.keys import Keys

_POLL_S = 0.1
_MOST = 20
"""Tests that are kept at once."""


class DeliveryStatus(StrEnum):
    DELIVERED = "delivered"
    FAILED = "failed"
    """The service was asked since the test began and did not take it; it is asked again for some minutes."""
    WAITING = "waiting"
    """It was not its turn yet: the receiver's messages for this minute are used up, or the leader is busy."""


class ReceiverResult(BaseModel):
    receiver: str
    fate: DeliveryStatus
    detail: str = ""


class TestResult(BaseModel):
    """What became of a test so far."""

    __test__ = False  # not one of pytest's

    id: str
    receivers: list[ReceiverResult]

    @property
    def done(self) -> bool:
        return all(r.fate is not DeliveryStatus.WAITING for r in self.receivers)

    @property
    def ok(self) -> bool:
        return all(r.fate is DeliveryStatus.DELIVERED for r in self.receivers)


def begin(etcd: EtcdClient, keys: Keys, election: Election, *, by: str = "operator",
          claim: IdempotencyClaim | None = None) -> str:
    """Writes a test down and returns its id. Needs the leadership. Raises problems: 409 when too many tests are under
    way, or when the ``claim`` was used already; 503 without leadership."""
    if not election.is_leader:
        raise no_leader(f"{election.replica} does not lead")
    prefix = f"{keys.alerts_prefix()}{state_machine.TEST}/"
    if etcd.count(prefix) >= _MOST:
        raise Problem(409, "conflict", "Too many tests are under way", f"{_MOST} at most; wait some minutes")
    test = state_machine.make_test_alert(time.time(), secrets.token_hex(6), by)
    guard, ops = election.guard, [Op.put(keys.alert(f"{test.key}/{test.id}"), test.encode())]
    compares = [*guard, *claim.compares] if claim else guard
    if not etcd.txn(compares, [*ops, *claim.ops(f"/v1/alerts/tests/{test.id}")] if claim else ops).succeeded:
        if not etcd.txn(guard, []).succeeded:
            raise no_leader(f"{election.replica} no longer leads")
        raise Problem(409, "conflict", "The same request is being carried out",
                      "a request with this Idempotency-Key was faster; send it again to get its answer")
    return test.id


def planned(names: Sequence[str]) -> TestResult:
    """The result of a test that was not begun."""
    return TestResult(id="", receivers=[ReceiverResult(receiver=name, fate=DeliveryStatus.WAITING) for name in names])


def result(etcd: EtcdClient, keys: Keys, names: Sequence[str], test_id: str) -> TestResult:
    """What became of a test so far, by receiver (``names``: ``receivers.names``). Raises a 404 problem when it is
    unknown or long over."""
    found = etcd.get(keys.alert(f"{state_machine.TEST}/{test_id}/{test_id}"))
    if found is None:
        raise not_found("test", test_id)
    test = Alert.decode(found.value)
    boxes = {b.receiver: b for b in (ReceiverQueue.decode(kv.value) for kv in etcd.range(keys.receivers_prefix())[0])}
    return TestResult(id=test_id, receivers=[_fate(test, n, boxes.get(n)) for n in names])


def run(etcd: EtcdClient, keys: Keys, election: Election, cfg: AlertConfig, *, by: str = "operator",
        timeout_s: float = 15.0) -> TestResult:
    """Begins a test and waits until every receiver took it or did not, for ``timeout_s`` at most."""
    names = receivers.names(cfg)
    test_id, end = begin(etcd, keys, election, by=by), time.monotonic() + timeout_s
    while not (found := result(etcd, keys, names, test_id)).done and time.monotonic() < end:
        time.sleep(_POLL_S)
    return found


def _fate(test: Alert, name: str, box: ReceiverQueue | None) -> ReceiverResult:
    if f"{Phase.FIRING}:{name}" in test.told:
        return ReceiverResult(receiver=name, fate=DeliveryStatus.DELIVERED)
    if box is not None and box.failures and max(box.sent, default=0.0) >= test.since:
        return ReceiverResult(receiver=name, fate=DeliveryStatus.FAILED, detail=box.error)
    return ReceiverResult(receiver=name, fate=DeliveryStatus.WAITING, detail=box.error if box else "")
