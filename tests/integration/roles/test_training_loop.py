"""What the training loop reports when the trainer group is lost, on real etcd; a stub answers for the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.etcd_server import EtcdServers

from elastic_rl import config
from elastic_rl.coordinator.targets import TRAINER
from elastic_rl.errors import Fenced, TrainerFailed
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import Event, RestartRequest
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.roles.loop import TrainingLoop
from elastic_rl.trainer.client import TrainerStatus


class StubTrainer:
    """A group that has re-formed as soon as it is waited for, at step 2."""

    def wait_ready(self, *, not_incarnation: str = "") -> TrainerStatus:
        return TrainerStatus(incarnation=f"{not_incarnation}+", step=2, phase="rl", policy_version=5, state_version=1,
                             restarts=0, cursor={})


@pytest.fixture
def loop(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[TrainingLoop]:
    cfg = config.parse({"job": keys.job, "run_dir": str(tmp_path), "data": {"operand_below": 10}})
    epoch = fencing.raise_epoch(etcd, keys, holder="test").number
    ctx = RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=keys.job, epoch=epoch, model_dir="")
    trainer: Any = StubTrainer()
    clients: Any = None
    with Membership(etcd, keys, "actor", "actor-1", ttl_s=10, epoch=epoch) as member:
        loop = TrainingLoop(ctx, etcd, member, trainer, clients)
        loop._resume(trainer.wait_ready())
        yield loop


def reports(etcd: EtcdClient, keys: Keys) -> list[Event]:
    return [e for e in events.recent(etcd, keys) if e.kind.startswith("trainer.")]


def test_loss_of_the_trainer_is_reported_as_a_fault(loop: TrainingLoop, etcd: EtcdClient, keys: Keys) -> None:
    loop._recover(TrainerFailed("a rank died"))
    assert [(e.kind, e.severity) for e in reports(etcd, keys)] == [
        ("trainer.failed", "error"), ("trainer.recovered", "info")]
    assert reports(etcd, keys)[0].message == "a rank died" and loop.step == 2


def test_requested_restart_of_the_trainer_is_not_reported_as_a_fault(loop: TrainingLoop, etcd: EtcdClient, keys: Keys
                                                                     ) -> None:
    request = RestartRequest(target=TRAINER, generation=1, reason="new driver library", by="ada")
    etcd.put(keys.restart(TRAINER), request.replace(observed_generation=1).encode())
    loop._recover(TrainerFailed("the trainer did not answer /train"))
    assert [(e.kind, e.severity) for e in reports(etcd, keys)] == [
        ("trainer.restarting", "info"), ("trainer.recovered", "info")]
    assert "new driver library" in reports(etcd, keys)[0].message

    # The same request says nothing about a later loss.
    loop._recover(TrainerFailed("a rank died"))
    assert [e.kind for e in reports(etcd, keys)][2:] == ["trainer.failed", "trainer.recovered"]


def test_loop_of_an_older_epoch_reports_nothing(loop: TrainingLoop, etcd: EtcdClient, keys: Keys) -> None:
    """A global restart ends the trainer of the old epoch: an alert about it would be one about the restart itself."""
    fencing.raise_epoch(etcd, keys, holder="global restart")
    with pytest.raises(Fenced):
        loop._recover(TrainerFailed("the trainer did not answer /train"))
    assert reports(etcd, keys) == []
