"""An incarnation whose epoch is over writes nothing more (I1), on a real etcd."""

from __future__ import annotations

import pytest

from elastic_rl.coordinator import epochs
from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.records import Engine, EngineState, JobStatus
from elastic_rl.coordinator.store import Op, Store
from elastic_rl.errors import Fenced
from elastic_rl.roles.run_log import JobStatusWriter


def test_the_status_of_an_old_incarnation_is_refused_and_the_new_one_stands(store: Store, keys: Keys) -> None:
    old = JobStatusWriter(store, keys, epoch=epochs.raise_epoch(store, keys, "first").number, steps=9, seed=0)
    old.write("rl", step=3)
    new = JobStatusWriter(store, keys, epoch=epochs.raise_epoch(store, keys, "second").number, steps=9, seed=0)
    new.write("rl", step=2)
    with pytest.raises(Fenced):
        old.write("rl", step=4)
    found = store.get(keys.job_status())
    assert found is not None and JobStatus.decode(found.value).step == 2


def test_a_fenced_transaction_does_none_of_its_operations(store: Store, keys: Keys) -> None:
    epoch = epochs.raise_epoch(store, keys, "first").number
    record = Engine(id="e", pool="rollout", state=EngineState.READY, epoch=epoch)
    epochs.write(store, keys, epoch, Op.put(keys.engine("e"), record.encode()))
    epochs.raise_epoch(store, keys, "second")
    with pytest.raises(Fenced):
        epochs.write(store, keys, epoch, Op.delete(keys.engine("e")), Op.put(keys.engine("f"), b"{}"))
    assert store.get(keys.engine("e")) is not None and store.get(keys.engine("f")) is None
