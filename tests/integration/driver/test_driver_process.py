"""The driver's loop, and its trainer group on Ray, when etcd is away and when a newer driver has begun its epoch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from support.etcd_server import EtcdServers

from elastic_rl import config
from elastic_rl.driver import __main__ as driver
from elastic_rl.driver.trainer_group import TrainerGroup
from elastic_rl.errors import Fenced
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership, members
from elastic_rl.etcd.records import JobStatus
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.runtime import wait_until


class StubPlane:
    """Takes the compute plane's place: each pass reads etcd, as a real one does."""

    passes = 0

    def __init__(self, ctx: RunContext, etcd: EtcdClient, report_phase: object) -> None:
        self._ctx, self._etcd = ctx, etcd

    def start(self) -> None:
        pass

    def reconcile(self) -> None:
        fencing.require_epoch(self._etcd, self._ctx.keys, self._ctx.epoch)
        type(self).passes += 1

    def close(self) -> None:
        pass


def test_driver_keeps_the_compute_plane_while_etcd_is_away(tmp_path: Path, keys: Keys,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "ComputePlane", StubPlane)
    servers = EtcdServers(tmp_path, 1)
    code: list[int] = []
    try:
        servers.start()
        cfg = config.parse({"job": keys.job, "run_dir": str(tmp_path),
                            "etcd": {"call_timeout_s": 0.5, "retry_budget_s": 1.0}})
        ctx = RunContext(config=cfg, etcd_endpoints=servers.endpoints, job=keys.job, epoch=0, model_dir="")
        thread = threading.Thread(target=lambda: code.append(driver.drive(ctx, "driver-1", threading.Event())))
        thread.start()
        wait_until(lambda: StubPlane.passes, timeout_s=30, what="the first pass")
        servers.stop(0)
        time.sleep(4)  # several times the budget of a call
        assert thread.is_alive() and not code
        servers.cont(0)
        passes = StubPlane.passes
        wait_until(lambda: StubPlane.passes > passes, timeout_s=30, what="a pass after the outage")
        with servers.connect() as etcd:
            etcd.put(keys.job_status(), JobStatus(phase="finished").encode())
        thread.join(30)
        assert code == [0]
    finally:
        servers.close()


@pytest.fixture(scope="module")
def on_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def group(on_ray: None, etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path
          ) -> Iterator[TrainerGroup]:
    """A trainer group whose agent cannot start: its context names no model."""
    cfg = config.parse({"job": keys.job, "run_dir": str(tmp_path), "device": {"type": "cpu"}})
    ctx = RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=keys.job, model_dir=str(tmp_path / "none"),
                     epoch=fencing.raise_epoch(etcd, keys, holder="test").number)
    group = TrainerGroup(ctx, etcd, ctx.save(tmp_path / "context.json"), lambda phase: None)
    yield group
    group.close()


def reports(etcd: EtcdClient, keys: Keys) -> list[str]:
    return [e.message for e in events.recent(etcd, keys) if e.kind == "trainer.agent_ended"]


def await_end(group: TrainerGroup) -> None:
    wait_until(lambda: group.reconcile() or group.failures, timeout_s=120, what="the end of the agent", poll_s=0.2)


def test_end_of_the_agent_is_reported(group: TrainerGroup, etcd: EtcdClient, keys: Keys) -> None:
    await_end(group)
    assert ["exit code 2" in message for message in reports(etcd, keys)] == [True]


def test_end_of_the_agent_after_a_global_restart_is_not_reported(group: TrainerGroup, etcd: EtcdClient, keys: Keys
                                                                 ) -> None:
    """The agent ends because the epoch is over; `trainer.dead` would be an alert about a restart on purpose."""
    group.reconcile()
    fencing.raise_epoch(etcd, keys, holder="global restart")
    with pytest.raises(Fenced):
        await_end(group)
    assert group.failures == 1, "the end of the agent was not seen"
    assert reports(etcd, keys) == []


def test_closed_group_deregisters_its_ranks_when_the_agent_was_killed(group: TrainerGroup, etcd: EtcdClient, keys: Keys
                                                                      ) -> None:
    """An agent that hangs is killed, and cannot deregister its ranks itself; their end would count as a death."""
    group.reconcile()
    rank = Membership(etcd, keys, "trainer", "rank-0", ttl_s=30, epoch=group.ctx.epoch).start()
    rank._stopping.set()  # as a killed process: no heartbeat any longer, and not deregistered
    other = Membership(etcd, keys, "trainer", "rank-1", ttl_s=30, epoch=group.ctx.epoch + 1).start()
    group.close()
    assert [m.id for m in members(etcd, keys, "trainer")] == ["rank-1"], "of a newer epoch"
    other.close()
