"""The experience ledger on a real etcd."""

from __future__ import annotations

import pytest

from elastic_rl.data.ledger import Ledger
from elastic_rl.errors import Conflict, Fenced
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Epoch, LedgerEntry

PER_STEP = 4


def entry(step: int, epoch: int = 1) -> LedgerEntry:
    groups = list(range((step - 1) * PER_STEP, step * PER_STEP))
    return LedgerEntry(step=step, epoch=epoch, groups=groups, samples=8 * PER_STEP, policy_versions=[step])


def raise_epoch_to(etcd: EtcdClient, keys: Keys, number: int) -> None:
    etcd.put(keys.epoch(), Epoch(number=number, holder="test", started_at=0.0).encode())


@pytest.fixture
def ledger(etcd: EtcdClient, keys: Keys) -> Ledger:
    raise_epoch_to(etcd, keys, 1)
    return Ledger(etcd, keys)


def test_entries_are_read_in_step_order_and_audit_clean(ledger: Ledger) -> None:
    for step in (3, 1, 2):
        ledger.record(entry(step))
    assert ledger.entries() == [entry(1), entry(2), entry(3)]
    found = ledger.audit(3, PER_STEP)
    assert (found.lost, found.duplicated) == ([], [])


def test_recording_an_entry_is_idempotent(ledger: Ledger, etcd: EtcdClient, keys: Keys) -> None:
    ledger.record(entry(1))
    before = etcd.get(keys.ledger(1))
    ledger.record(entry(1))
    assert etcd.get(keys.ledger(1)) == before


def test_another_entry_for_a_recorded_step_is_a_conflict(ledger: Ledger) -> None:
    ledger.record(entry(1))
    with pytest.raises(Conflict, match="step 1"):
        ledger.record(entry(1).replace(samples=1))
    assert ledger.entries() == [entry(1)]


def test_rewind_deletes_the_entries_after_the_step_only(ledger: Ledger) -> None:
    for step in range(1, 8):
        ledger.record(entry(step))
    assert ledger.rewind(4) == [5, 6, 7]
    assert [e.step for e in ledger.entries()] == [1, 2, 3, 4]
    assert ledger.rewind(4) == []
    ledger.record(entry(5).replace(samples=5))  # the step can be recorded again
    found = ledger.audit(5, PER_STEP)
    assert (found.lost, found.duplicated) == ([], [])


def test_rewind_deletes_more_entries_than_one_transaction_takes(ledger: Ledger) -> None:
    for step in range(1, 231):
        ledger.record(entry(step))
    assert ledger.rewind(3) == list(range(4, 231))
    assert [e.step for e in ledger.entries()] == [1, 2, 3]


def test_older_epoch_can_neither_record_nor_rewind(ledger: Ledger, etcd: EtcdClient, keys: Keys) -> None:
    ledger.record(entry(1))
    raise_epoch_to(etcd, keys, 2)
    for write in (lambda: ledger.record(entry(2, epoch=1)), lambda: ledger.rewind(0, epoch=1)):
        with pytest.raises(Fenced, match="epoch"):
            write()
    assert ledger.entries() == [entry(1)]
    ledger.record(entry(2, epoch=2))


def test_write_during_which_a_new_epoch_begins_is_refused(ledger: Ledger, etcd: EtcdClient, keys: Keys,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    txn, raised = etcd.txn, []

    def raise_epoch_then_txn(*args, **kwargs):
        if not raised:
            raised.append(True)
            raise_epoch_to(etcd, keys, 2)  # after the ledger read the epoch, before it writes
        return txn(*args, **kwargs)

    monkeypatch.setattr(etcd, "txn", raise_epoch_then_txn)
    with pytest.raises(Fenced):
        ledger.record(entry(1))
    assert raised and ledger.entries() == []


def test_run_without_an_epoch_records_nothing(etcd: EtcdClient, keys: Keys) -> None:
    with pytest.raises(Fenced, match="epoch"):
        Ledger(etcd, keys).record(entry(1))
    assert Ledger(etcd, keys).rewind(0) == []


def test_audit_names_a_step_that_was_never_recorded(ledger: Ledger) -> None:
    for step in (1, 3):
        ledger.record(entry(step))
    assert ledger.audit(3, PER_STEP).lost == [4, 5, 6, 7]
