"""What becomes of an engine that does not end when it was drained. etcd is real; a stand-in takes the place of the
engine's Ray actor."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.etcd_server import EtcdServers
from support.placed_actors import StandInActor, stand_in_for_ray

from elastic_rl import config
from elastic_rl.config import ROLLOUT_POOL
from elastic_rl.coordinator.targets import engine_target
from elastic_rl.driver import external_engines, pool
from elastic_rl.driver.external_engines import ExternalEngines
from elastic_rl.driver.hosts_of_ray import RayHosts
from elastic_rl.driver.pool import EnginePool
from elastic_rl.driver.restart_requests import open_requests
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import FAILURE_POLICY, Engine, EngineState, ExternalEngine, PoolSpec, RestartRequest
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.net.addresses import LOOPBACK


@pytest.fixture
def ctx(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
        ) -> RunContext:
    stand_in_for_ray(monkeypatch, pool, external_engines)
    cfg = config.parse({"job": keys.job, "run_dir": str(tmp_path), "device": {"type": "cpu"},
                        "rollout": {"engines": 1}, "engine": {"drain_timeout_s": 77.0}})
    return RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=keys.job, model_dir="",
                      epoch=fencing.raise_epoch(etcd, keys, holder="test").number, host=LOOPBACK)


def test_drained_engine_of_a_pool_that_hangs_is_killed_once_its_time_is_over(ctx: RunContext, etcd: EtcdClient,
                                                                             keys: Keys) -> None:
    engines = EnginePool(ctx, etcd)
    engines.take_over()
    engines.reconcile({})
    [hung] = StandInActor.made
    etcd.put(keys.engine(hung.name), Engine(id=hung.name, pool=ROLLOUT_POOL, state=EngineState.READY,
                                            epoch=ctx.epoch).encode())
    etcd.put(keys.pool_spec(ROLLOUT_POOL), PoolSpec(name=ROLLOUT_POOL, desired=0).encode())
    for _ in range(3):
        engines.reconcile({})
        assert not hung.is_removed and etcd.get(keys.engine(hung.name)) is not None
    assert hung.asked == ["drain"] and hung.grace_s == 77.0 + pool._END_GRACE_S
    hung.grace_is_over = True
    engines.reconcile({})  # kills it
    engines.reconcile({})  # removes it
    assert hung.is_removed and etcd.get(keys.engine(hung.name)) is None and StandInActor.made == [hung]


def test_engine_that_was_drained_before_it_has_begun_is_asked_once(ctx: RunContext, etcd: EtcdClient, keys: Keys
                                                                   ) -> None:
    engines = EnginePool(ctx, etcd)
    engines.take_over()
    engines.reconcile({})
    [slow] = StandInActor.made
    etcd.put(keys.pool_spec(ROLLOUT_POOL), PoolSpec(name=ROLLOUT_POOL, desired=0).encode())
    for _ in range(3):
        engines.reconcile({})
    assert slow.asked == ["drain"]
    assert [e.kind for e in events.recent(etcd, keys, 100) if e.subject == slow.name] == [
        "engine.starting", "engine.draining"]
    etcd.put(keys.pool_spec(ROLLOUT_POOL), PoolSpec(name=ROLLOUT_POOL, desired=1).encode())
    engines.reconcile({})
    assert len(StandInActor.made) == 2, "another one takes its place"


@pytest.mark.parametrize(("by", "ended_by"), [(FAILURE_POLICY, "kill_hung"), ("ann", "kill")])
def test_engine_that_the_failure_policy_ends_is_to_write_its_stacks_first(
        ctx: RunContext, etcd: EtcdClient, keys: Keys, by: str, ended_by: str) -> None:
    engines = EnginePool(ctx, etcd)
    engines.take_over()
    engines.reconcile({})
    [hung] = StandInActor.made
    target = engine_target(hung.name)
    etcd.put(keys.restart(target), RestartRequest(target=target, generation=1, by=by).encode())
    for _ in range(2):
        engines.reconcile(open_requests(etcd, keys))
    assert hung.ended_by == ended_by
    if by == FAILURE_POLICY:
        assert hung.grace_s == pool._STACKS_GRACE_S and not hung.is_removed and open_requests(etcd, keys)
        hung.grace_is_over = True
        for _ in range(2):
            engines.reconcile(open_requests(etcd, keys))
    assert hung.is_removed and not open_requests(etcd, keys)


def test_runner_of_an_external_engine_that_hangs_is_killed_once_its_time_is_over(ctx: RunContext, etcd: EtcdClient,
                                                                                 keys: Keys) -> None:
    url, unrouted = "http://a:1", list[str]()
    engines = ExternalEngines(ctx, etcd, ROLLOUT_POOL, unroute=unrouted.append)
    etcd.put(keys.external_engine(url), ExternalEngine(engine="x0", pool=ROLLOUT_POOL, url=url).encode())
    engines.reconcile({}, {}, RayHosts())
    [hung] = StandInActor.made
    etcd.delete(keys.external_engine(url))
    for _ in range(3):
        engines.reconcile({}, {}, RayHosts())
        assert not hung.is_removed and not unrouted
    assert hung.asked == ["drain"] and hung.grace_s == 77.0 + external_engines._END_GRACE_S
    hung.grace_is_over = True
    engines.reconcile({}, {}, RayHosts())
    assert hung.is_removed and unrouted == [url] and not engines.placed
