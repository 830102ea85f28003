"""An incarnation whose epoch is over writes nothing more (I1), on a real etcd."""

from __future__ import annotations

import pytest

from elastic_rl.errors import Fenced
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState, JobStatus
from elastic_rl.roles.run_log import JobStatusWriter


def test_the_status_of_an_old_incarnation_is_refused_and_the_new_one_stands(etcd: EtcdClient, keys: Keys) -> None:
    old = JobStatusWriter(etcd, keys, epoch=fencing.raise_epoch(etcd, keys, "first").number, steps=9, seed=0)
    old.write("rl", step=3)
    new = JobStatusWriter(etcd, keys, epoch=fencing.raise_epoch(etcd, keys, "second").number, steps=9, seed=0)
    new.write("rl", step=2)
    with pytest.raises(Fenced):
        old.write("rl", step=4)
    found = etcd.get(keys.job_status())
    assert found is not None and JobStatus.decode(found.value).step == 2


def test_a_fenced_transaction_does_none_of_its_operations(etcd: EtcdClient, keys: Keys) -> None:
    epoch = fencing.raise_epoch(etcd, keys, "first").number
    record = Engine(id="e", pool="rollout", state=EngineState.READY, epoch=epoch)
    fencing.write(etcd, keys, epoch, Op.put(keys.engine("e"), record.encode()))
    fencing.raise_epoch(etcd, keys, "second")
    with pytest.raises(Fenced):
        fencing.write(etcd, keys, epoch, Op.delete(keys.engine("e")), Op.put(keys.engine("f"), b"{}"))
    assert etcd.get(keys.engine("e")) is not None and etcd.get(keys.engine("f")) is None
