"""A change of the admin API, on a model of etcd that loses answers and applies copies late, under a leader that may
change at any moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_rl.coordinator.leader_transaction import LeaderTransaction
from elastic_rl.coordinator.problems import Problem
from elastic_rl.errors import EtcdUnavailable, Fenced, OutcomeUnknown
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import Compare, KeyValue, Op
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.transaction import TxnResult
from tests.support.budget import seeds

KEYS = Keys("j")
LEADER, COUNTER, CLAIM = ClusterKeys(KEYS.job).leader("a"), KEYS.pool_spec("rollout"), KEYS.idempotency("k")


@dataclass
class LossyEtcd:
    """Keys as etcd keeps them. Of a transaction whose answer it loses, the copy arrives now, with the next one, or
    never."""

    kvs: dict[str, KeyValue] = field(default_factory=dict)
    revision: int = 1
    losses: Iterator[str] = iter(())
    late: list[tuple[Sequence[Compare], Sequence[Op]]] = field(default_factory=list)

    def get(self, key: str) -> KeyValue | None:
        if next(self.losses, "answered") != "answered":
            raise EtcdUnavailable("no member answers")
        return self.kvs.get(key)

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()) -> TxnResult:
        while self.late:
            self._apply(*self.late.pop())
        match next(self.losses, "answered"):
            case "answered":
                held = self._apply(compares, then)
                reads = tuple(kv for op in orelse if not held and (kv := self.kvs.get(op.key)) is not None)
                return TxnResult(held, self.revision, reads)
            case "applied":
                self._apply(compares, then)
            case "late":
                self.late.append((compares, then))
        raise OutcomeUnknown("no member answers")

    def _apply(self, compares: Sequence[Compare], then: Sequence[Op]) -> bool:
        held = all(c.holds(self.kvs.get(c.key)) for c in compares)
        for op in then if held else ():
            self.put(op.key, op.data)
        return held

    def put(self, key: str, value: bytes) -> None:
        self.revision += 1
        old = self.kvs.get(key)
        self.kvs[key] = KeyValue(key, value, old.create_revision if old else self.revision, self.revision,
                                 old.version + 1 if old else 1, 0)


class Claim:
    compares = [Compare.absent(CLAIM)]

    def ops(self, location: str) -> list[Op]:
        return [Op.put(CLAIM, location.encode())]


def leading(etcd: LossyEtcd) -> FencedWriter:
    etcd.put(LEADER, b"")
    guard = [Compare.create(LEADER, "==", etcd.kvs[LEADER].create_revision)]
    return FencedWriter(etcd, KEYS, lambda: guard, "the term of replica a")  # type: ignore[arg-type]


def count_once(etcd: LossyEtcd) -> LeaderTransaction:
    """Adds one to a counter that nobody has changed since it was read."""
    found = etcd.get(COUNTER)
    value, revision = (int(found.value), found.mod_revision) if found else (0, 0)
    event = events.build(event_kinds.POOL_SCALED, "rollout", "m")
    return LeaderTransaction.with_event(KEYS, event, [Compare.mod(COUNTER, "==", revision)],
                                        [Op.put(COUNTER, str(value + 1).encode())])


LOSSES = st.lists(st.sampled_from(["answered", "applied", "late", "never"]), max_size=12)


@settings(max_examples=seeds(40))
@given(LOSSES)
def test_change_is_reported_as_made_only_when_made_and_never_made_twice(losses: list[str]) -> None:
    etcd = LossyEtcd()
    writer = leading(etcd)
    etcd.losses = iter(losses)
    made = unknown = 0
    for _ in range(len(losses) + 1):
        try:
            change = count_once(etcd)
        except EtcdUnavailable:
            continue
        try:
            made += change.commit(etcd, writer) > 0  # type: ignore[arg-type]
        except OutcomeUnknown:
            unknown += 1
    counted = int(etcd.kvs[COUNTER].value) if COUNTER in etcd.kvs else 0
    assert made <= counted <= made + unknown


def test_change_whose_answer_was_lost_is_found_by_its_event() -> None:
    etcd = LossyEtcd()
    writer, change = leading(etcd), count_once(etcd)
    etcd.losses = iter(["applied"])
    assert change.commit(etcd, writer) == etcd.kvs[change.proof].create_revision  # type: ignore[arg-type]


@pytest.mark.parametrize("losses", [["late"], ["never"], ["applied", "never"]])
def test_change_that_cannot_be_seen_is_unknown_and_not_refused(losses: list[str]) -> None:
    etcd = LossyEtcd()
    writer, change = leading(etcd), count_once(etcd)
    etcd.losses = iter(losses)
    with pytest.raises(OutcomeUnknown):
        change.commit(etcd, writer)  # type: ignore[arg-type]


def test_change_of_a_record_that_changed_meanwhile_is_not_made() -> None:
    etcd = LossyEtcd()
    writer, change = leading(etcd), count_once(etcd)
    etcd.put(COUNTER, b"7")
    assert change.commit(etcd, writer) == 0 and etcd.kvs[COUNTER].value == b"7"  # type: ignore[arg-type]


def test_replica_that_lost_the_leadership_changes_nothing() -> None:
    etcd = LossyEtcd()
    writer, change = leading(etcd), count_once(etcd)
    del etcd.kvs[LEADER]
    with pytest.raises(Problem, match="term of replica a is over") as refused:
        change.commit(etcd, writer)  # type: ignore[arg-type]
    assert refused.value.status == 503 and COUNTER not in etcd.kvs


def test_replica_that_does_not_lead_changes_nothing() -> None:
    def token() -> list[Compare]:
        raise Fenced("replica b does not lead")

    etcd = LossyEtcd()
    with pytest.raises(Problem, match="does not lead"):
        count_once(etcd).commit(etcd, FencedWriter(etcd, KEYS, token, "b"))  # type: ignore[arg-type]


def test_second_request_with_one_idempotency_key_is_refused() -> None:
    etcd = LossyEtcd()
    writer = leading(etcd)
    assert count_once(etcd).commit(etcd, writer, Claim(), "/v1/jobs/j/operations/1")  # type: ignore[arg-type]
    with pytest.raises(Problem, match="faster"):
        count_once(etcd).commit(etcd, writer, Claim(), "/v1/jobs/j/operations/2")  # type: ignore[arg-type]
    assert (etcd.kvs[CLAIM].value, etcd.kvs[COUNTER].value) == (b"/v1/jobs/j/operations/1", b"1")
