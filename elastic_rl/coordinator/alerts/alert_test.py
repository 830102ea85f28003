"""``alerts test``: sends a test notification to every receiver, the way of every alert, and reports its delivery.

The test is an alert in etcd, which the leader delivers and drops some minutes later, so any replica can start one and
read its result.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from enum import StrEnum

from pydantic import BaseModel

from elastic_rl.coordinator.alerts import state_machine
from elastic_rl.coordinator.alerts.receiver_queue import ReceiverQueue
from elastic_rl.coordinator.alerts.state_machine import Alert, Phase, notified_entry
from elastic_rl.coordinator.api_paths import job_path
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.leader_transaction import IdempotencyClaim, LeaderTransaction
from elastic_rl.coordinator.problems import Problem, concurrent_modification, no_leader, not_found, unreadable
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.keys import Keys

_MAX_TESTS = 20
"""Tests that are stored at once."""


class DeliveryStatus(StrEnum):
    DELIVERED = "delivered"
    FAILED = "failed"
    """An attempt since the test started has failed; it is retried for some minutes."""
    WAITING = "waiting"
    """No attempt yet: the receiver's rate limit is reached, or the leader is busy."""


class ReceiverResult(BaseModel):
    receiver: str
    status: DeliveryStatus
    detail: str = ""


class TestResult(BaseModel):
    """The delivery of a test so far."""

    __test__ = False  # not one of pytest's

    id: str
    receivers: list[ReceiverResult]


def begin(etcd: EtcdClient, keys: Keys, election: Election, *, by: str = "operator",
          claim: IdempotencyClaim | None = None) -> str:
    """Starts a test and returns its id. Needs the leadership. Raises problems: 409 when too many tests are in progress
    or when the ``claim`` was used already; 503 without leadership."""
    if not election.is_leader:
        raise no_leader(f"{election.replica} does not lead")
    prefix = f"{keys.alerts_prefix()}{state_machine.TEST}/"
    if etcd.count(prefix) >= _MAX_TESTS:
        raise Problem(409, "conflict", "Too many tests are in progress",
                      f"at most {_MAX_TESTS}; try again in a few minutes")
    test = state_machine.make_test_alert(time.time(), secrets.token_hex(6), by)
    key = keys.alert(f"{test.key}/{test.id}")
    change = LeaderTransaction([Compare.absent(key)], [Op.put(key, test.encode())], proof=key)
    if not change.commit(etcd, election.writer, claim, job_path(keys.job, "alerts", "tests", test.id)):
        raise concurrent_modification()
    return test.id


def planned(names: Sequence[str]) -> TestResult:
    """The result of a dry run."""
    return TestResult(id="", receivers=[ReceiverResult(receiver=name, status=DeliveryStatus.WAITING) for name in names])


def result(etcd: EtcdClient, keys: Keys, names: Sequence[str], test_id: str) -> TestResult:
    """The delivery of a test so far. ``names``: the names of the receivers. Raises a 404 problem for a test that is
    unknown or was dropped."""
    found = etcd.get(keys.alert(f"{state_machine.TEST}/{test_id}/{test_id}"))
    if found is None:
        raise not_found("test", test_id)
    if (test := readable_one(found, Alert)) is None:
        raise unreadable("test", test_id)
    queues = readable(etcd.range(keys.receivers_prefix())[0], ReceiverQueue)
    by_receiver = {queue.receiver: queue for queue, _ in queues}
    return TestResult(id=test_id, receivers=[_result(test, n, by_receiver.get(n)) for n in names])


def _result(test: Alert, name: str, queue: ReceiverQueue | None) -> ReceiverResult:
    if notified_entry(Phase.FIRING, name) in test.notified:
        return ReceiverResult(receiver=name, status=DeliveryStatus.DELIVERED)
    if queue is not None and queue.failures and max(queue.sent_at, default=0.0) >= test.since:
        return ReceiverResult(receiver=name, status=DeliveryStatus.FAILED, detail=queue.error)
    return ReceiverResult(receiver=name, status=DeliveryStatus.WAITING, detail=queue.error if queue else "")
