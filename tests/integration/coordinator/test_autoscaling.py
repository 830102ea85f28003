"""Autoscaling on a real etcd, under leaders that come and go. The tests write what engines, driver and actor would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
from support.leader import Leader
from support.waiting import wait_until

from elastic_rl.config import Config, parse
from elastic_rl.config.autoscale import AutoscaleConfig
from elastic_rl.coordinator import autoscalers
from elastic_rl.coordinator.autoscaling.controller import BY
from elastic_rl.coordinator.leader_clock import LeaderTime
from elastic_rl.coordinator.operations.service import OperationService
from elastic_rl.coordinator.problems import Problem
from elastic_rl.driver.pool_removal import remove_pools_except
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import (
    Autoscaler,
    AutoscalerState,
    Engine,
    EngineState,
    Event,
    JobStatus,
    Operation,
    OperationState,
    PoolSpec,
    PoolStatus,
    StepMetrics,
)

POOL = "rollout"
QUICK = {"mode": "automatic", "min_engines": 2, "max_engines": 5, "max_step_up": 2, "up_after_s": 0.3,
         "down_after_s": 0.3, "up_cooldown_s": 0.3, "down_cooldown_s": 0.3}
HIGH, LOW = {"waiting": 9, "token_usage": 0.95}, {"waiting": 0, "token_usage": 0.0}


def config_with(**changes: Any) -> Config:
    # Steps take no time, so that a low load needs to last for none of them.
    return parse({"job": "x", "coordinator": {"lease_ttl_s": 2, "reconcile_interval_s": 0.1},
                  "rollout": {"autoscale": {**QUICK, **changes}}})


class Plane:
    """The compute plane: engines that report their load, the pool's status, and a run that has made a step."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self.etcd, self.keys = etcd, keys
        self.members: dict[str, Membership] = {}
        self._actor = Membership(etcd, keys, "actor", "a", ttl_s=20).start()
        etcd.put(keys.pool_spec(POOL), PoolSpec(name=POOL, desired=2).encode())
        etcd.put(keys.job_status(), JobStatus(phase="rl", step=3, stage="generate").encode())
        # Of the far past: what counts is when the leader saw it first, not the clock of this machine.
        etcd.put(keys.step_metrics(3), StepMetrics(step=3, at=1.0, reward=0.5, seconds={
            "total": 0.01, "generate": 0.008}).encode())

    def engines(self, count: int, **load: Any) -> None:
        """The pool has so many ready engines with this load."""
        for number in range(count):
            name = f"{POOL}-{number}"
            if name not in self.members:
                self.members[name] = Membership(self.etcd, self.keys, "engine", name, ttl_s=20).start()
            self.etcd.put(self.keys.engine(name), Engine(**{
                "id": name, "pool": POOL, "state": EngineState.READY, "epoch": 1, "load_known": True,
                "incarnation": self.members[name].incarnation, **load}).encode())
        for name in [n for n in self.members if int(n.rpartition("-")[2]) >= count]:
            self.etcd.delete(self.keys.engine(name))
            self.members.pop(name).close()
        self.etcd.put(self.keys.pool_status(POOL),
                      PoolStatus(name=POOL, ready=count, starting=0, draining=0).encode())

    @property
    def desired(self) -> int:
        found = self.etcd.get(self.keys.pool_spec(POOL))
        assert found is not None
        return PoolSpec.decode(found.value).desired

    @property
    def state(self) -> AutoscalerState | None:
        found = self.etcd.get(self.keys.autoscaler_state(POOL))
        return AutoscalerState.decode(found.value) if found else None

    def operations(self) -> list[Operation]:
        return [Operation.decode(kv.value) for kv in self.etcd.range(self.keys.operations_prefix())[0]]

    def events(self, kind: str) -> list[Event]:
        return [e for e in events.recent(self.etcd, self.keys, 1000) if e.kind == kind]

    def close(self) -> None:
        for member in (self._actor, *self.members.values()):
            member.close()


@pytest.fixture
def plane(etcd: EtcdClient, keys: Keys) -> Iterator[Plane]:
    made = Plane(etcd, keys)
    yield made
    made.close()


@pytest.fixture
def lead(etcd: EtcdClient, keys: Keys, plane: Plane) -> Iterator[Callable[..., Leader]]:
    made: list[Leader] = []

    def make(name: str = "a", **changes: Any) -> Leader:
        made.append(Leader(etcd, keys, config_with(**changes), name))
        return made[-1]

    yield make
    for leader in made:
        leader.close()


def await_passes(leader: Leader, count: int = 3) -> None:
    """Waits until the leader has made so many more passes."""
    with patch.object(leader.reconciler, "reconcile_once", wraps=leader.reconciler.reconcile_once) as spied:
        wait_until(lambda: spied.call_count > count, what="passes of the leader")


def test_high_load_scales_by_an_operation_and_no_further_until_that_is_done(
        lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys) -> None:
    plane.engines(2, **HIGH)
    lead()
    wait_until(lambda: plane.desired == 4, what="the first scale-out")
    [op] = plane.operations()
    assert (op.by, op.target, op.params["desired"]) == (BY, f"pools/{POOL}", 4)
    [event] = plane.events("pool.scaled")
    assert "2 → 4 engines, by autoscaler" in event.message and "9.0 requests wait" in event.message
    state = plane.state
    assert state is not None and state.desired == 4, "written in the operation's transaction"
    wait_until(lambda: "the scale of pools/rollout is not done" in (plane.state or state).message or None,
               timeout_s=40.0, what="the leader's word on why it waits")
    assert plane.desired == 4
    plane.engines(4, **HIGH)
    wait_until(lambda: plane.desired == 5, what="the second scale-out, up to the bound")
    assert plane.operations()[0].state is OperationState.SUCCEEDED
    plane.engines(5, **LOW)
    wait_until(lambda: plane.desired == 4, what="the scale-in")


def test_next_leader_goes_on_with_what_is_in_etcd(lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys) -> None:
    slow = {"up_after_s": 300.0, "up_cooldown_s": 500.0}
    etcd.put(keys.leader_clock(), LeaderTime(seconds=1000.0).encode())
    etcd.put(keys.autoscaler_state(POOL), AutoscalerState(
        pool=POOL, desired=2, changed_s=400.0, observed_s=999.0, high_s=299.5).encode())
    plane.engines(2, **HIGH)
    first = lead("a", **slow)
    wait_until(lambda: plane.desired == 4, what="the scale-out, long before a new count would be due")
    plane.engines(4, **HIGH)
    wait_until(lambda: all(op.state.ended for op in plane.operations()), what="the end of the operation")
    first.close()
    second = lead("b", **slow)
    await_passes(second)
    state = plane.state
    assert state is not None and state.desired == plane.desired == 4 and 990 < state.changed_s < 1100


def test_persons_number_is_the_new_start_and_one_beyond_the_bounds_is_refused(
        lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys) -> None:
    plane.engines(2, waiting=0, token_usage=0.6)
    leader = lead()
    wait_until(lambda: plane.state, what="the start")
    leader.operations.scale(POOL, 3, by="ann")
    wait_until(lambda: plane.state and plane.state.desired == 3, what="the new start")
    assert plane.desired == 3
    for number in (1, 6):
        with pytest.raises(Problem, match="autoscaled from 2 to 5"):
            leader.operations.scale(POOL, number, by="ann")
    plane.engines(3, waiting=0, token_usage=0.6)
    op = plane.operations()[0]
    wait_until(lambda: leader.operation(op.id).state.ended, what="the end of ann's scale")
    leader.operations.scale(POOL, 2, by="ann")
    with pytest.raises(Problem, match="autoscaled from 2 to 5"):
        leader.operations.drain(f"{POOL}-0", replace=False, by="ann")


def test_dry_run_reports_once_what_it_would_set(lead: Any, plane: Plane) -> None:
    plane.engines(2, **HIGH)
    leader = lead(mode="dry_run")
    [event] = wait_until(lambda: plane.events("pool.scaling_recommended"), what="the recommendation")
    assert event.data["recommended"] == 4 and "2 → 4 engines would be set: 9.0 requests" in event.message
    await_passes(leader)
    assert plane.desired == 2 and plane.operations() == []
    assert len(plane.events("pool.scaling_recommended")) == 1


def test_probe_that_was_not_answered_changes_nothing(lead: Any, plane: Plane) -> None:
    plane.engines(2, **HIGH, load_known=False)
    leader = lead()
    wait_until(lambda: plane.state, what="the start")
    await_passes(leader)
    state = plane.state
    assert state is not None and "have not answered their last probe" in state.message
    assert plane.desired == 2 and plane.operations() == []


def test_disabled_pool_is_left_alone_also_where_the_settings_say_otherwise(
        lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys) -> None:
    leader = lead()
    cfg = config_with()
    wait_until(lambda: plane.state, what="the start")
    done = autoscalers.change(etcd, keys, cfg, leader.election, POOL, None, by="ann")
    assert (done.mode, done.max_engines, done.source, done.by) == ("disabled", 5, "api", "ann")
    wait_until(lambda: plane.state is None, what="the end of its state")
    plane.engines(2, **HIGH)
    await_passes(leader)
    assert plane.desired == 2 and plane.operations() == []
    leader.operations.scale(POOL, 9, by="ann")  # no bounds any more
    again = autoscalers.change(etcd, keys, cfg, leader.election, POOL, AutoscaleConfig(mode="external", max_engines=7),
                            by="ann")
    assert again.source == "api"
    wait_until(lambda: plane.desired == 7, what="a number within the bounds")


def test_disabling_holds_where_the_settings_say_the_same_and_later_ones_do_not(
        lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys) -> None:
    leader, off = lead(mode="disabled"), config_with(mode="disabled")
    done = autoscalers.change(etcd, keys, off, leader.election, POOL, None, by="ann")
    assert (done.mode, done.source) == ("disabled", "api")
    found = autoscalers.get(etcd, keys, config_with(), POOL)
    assert found.mode == "disabled", "the settings of the next start have it automatic"


def test_number_that_is_refused_is_not_requested_with_each_pass(lead: Any, plane: Plane) -> None:
    with (patch("elastic_rl.coordinator.operations.service._MAX_OPERATIONS", 0),
          patch.object(OperationService, "scale", autospec=True, side_effect=OperationService.scale) as scale):
        plane.engines(2, **HIGH)
        leader = lead()
        wait_until(lambda: plane.state and "4 engines were refused" in plane.state.message, what="the refusal")
        await_passes(leader)
        assert scale.call_count == 1
    assert plane.desired == 2


def test_bounds_are_within_the_most_engines_that_a_pool_may_have() -> None:
    record = Autoscaler(pool=POOL, mode="automatic", min_engines=80, max_engines=100)
    found = autoscalers.effective(record, parse({"job": "x", "coordinator": {"max_engines": 64}}), POOL)
    assert (found.min_engines, found.max_engines) == (64, 64), "the limit was lowered since: no scale beyond it works"


def test_autoscaler_of_a_newer_release_is_left_alone(lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys) -> None:
    record = Autoscaler(pool=POOL, mode="automatic")
    etcd.put(keys.autoscaler(POOL), json.dumps({**json.loads(record.encode()), "mode": "predictive"}).encode())
    plane.engines(2, **HIGH)
    leader = lead()
    await_passes(leader)
    assert plane.state is None and plane.desired == 2
    with pytest.raises(Problem, match="later release"):
        leader.operations.scale(POOL, 3, by="ann")


def test_pool_that_is_removed_takes_its_autoscaling_along(lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys
                                                          ) -> None:
    leader = lead()
    cfg = config_with()
    autoscalers.change(etcd, keys, cfg, leader.election, POOL, AutoscaleConfig(mode="external"), by="ann")
    wait_until(lambda: plane.state, what="its state")
    remove_pools_except(etcd, keys, leader.election.writer, ["other"])
    wait_until(lambda: etcd.count(keys.autoscaling_prefix()) == 0, what="the end of its autoscaling")
