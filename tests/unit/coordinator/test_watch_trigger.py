"""Which changes of etcd trigger a pass of the leader."""

from __future__ import annotations

from typing import Literal

from elastic_rl.coordinator.watch_trigger import WatchTrigger
from elastic_rl.etcd.client import EtcdClient, KeyValue, WatchEvent
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState, JobStatus

KEYS = Keys("job")


def trigger() -> WatchTrigger:
    return WatchTrigger(EtcdClient.__new__(EtcdClient), KEYS, lambda: None, lambda: True)


def change(key: str, value: bytes = b"", kind: Literal["put", "delete"] = "put", version: int = 2) -> WatchEvent:
    return WatchEvent(kind, KeyValue(key, value, 1, 2, version, 0))


def engine(state: EngineState, version: int) -> WatchEvent:
    return change(KEYS.engine("e"), Engine(id="e", pool="rollout", state=state, epoch=1, version=version).encode())


def job(phase: str, step: int) -> WatchEvent:
    return change(KEYS.job_status(), JobStatus(phase=phase, step=step, steps=9, seed=0, started_at=0.0,
                                               updated_at=0.0).encode())


def test_engine_triggers_by_its_state_and_not_by_what_each_step_changes() -> None:
    seen = trigger()
    assert seen.matters(engine(EngineState.READY, 1))
    assert not seen.matters(engine(EngineState.READY, 2))
    assert seen.matters(engine(EngineState.DEAD, 2))
    assert seen.matters(change(KEYS.engine("e"), kind="delete"))
    assert seen.matters(engine(EngineState.DEAD, 2)), "an engine that comes again is new"
    assert seen.matters(change(KEYS.engine("e"), b"unreadable"))
    assert seen.matters(change(KEYS.engine("e"), b"unreadable"))


def test_job_triggers_by_its_phase() -> None:
    seen = trigger()
    assert seen.matters(job("rl", 1))
    assert not seen.matters(job("rl", 2))
    assert seen.matters(job("finished", 2))


def test_members_trigger_by_coming_and_going() -> None:
    seen, key = trigger(), KEYS.member("rank", "rank-0")
    assert seen.matters(change(key, version=1))
    assert not seen.matters(change(key, version=2))
    assert seen.matters(change(key, kind="delete"))


def test_what_the_leader_decides_by_triggers_and_nothing_else_does() -> None:
    seen = trigger()
    for key in (KEYS.leader(), KEYS.pool_spec("rollout"), KEYS.restart("job"), KEYS.event("1"), KEYS.operation("o")):
        assert seen.matters(change(key)), key
    for key in (KEYS.step_metrics(3), KEYS.version("policy", 3), KEYS.sample(0), KEYS.heartbeats("h")):
        assert not seen.matters(change(key)), key
