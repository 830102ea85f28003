"""The turns of a pool's engines to pause, in a real etcd, when an engine does not hear whether it has one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elastic_rl.engine.update_turns import PoolSlots
from elastic_rl.errors import OutcomeUnknown
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import PoolSpec


@pytest.fixture
def lease(etcd: EtcdClient) -> Iterator[int]:
    granted = etcd.grant(60)
    yield granted
    etcd.revoke(granted)


def slots(etcd: EtcdClient, keys: Keys, holder: str, lease: int) -> PoolSlots:
    return PoolSlots(etcd, keys, "rollout", "50%", holder=holder, lease=lambda: lease)


def test_claim_of_which_nothing_was_heard_is_resolved_by_reading(
        etcd: EtcdClient, keys: Keys, lease: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (slots(etcd, keys, name, lease) for name in ("first", "second"))
    txn = etcd.txn

    def unheard(*args: Any) -> Any:
        txn(*args)
        raise OutcomeUnknown("the answer is lost")

    with monkeypatch.context() as patch:
        patch.setattr(etcd, "txn", unheard)
        with pytest.raises(OutcomeUnknown):
            first.claim(0)
    assert not second.claim(0) and first.claim(0), "it happened"
    second.free(0)
    assert first.claim(0), "another engine's slot was freed"

    with monkeypatch.context() as patch:
        patch.setattr(etcd, "txn", unheard)
        with pytest.raises(OutcomeUnknown):
            first.free(0)
    assert second.claim(0) and not first.claim(0), "it happened, and another engine was faster"


def test_number_of_slots_follows_the_pool(etcd: EtcdClient, keys: Keys, lease: int) -> None:
    made = slots(etcd, keys, "first", lease)
    assert made.count() == 1, "of a pool that has no spec yet"
    etcd.txn([], [Op.put(keys.pool_spec("rollout"), PoolSpec(name="rollout", desired=8).encode())])
    assert made.count() == 4
