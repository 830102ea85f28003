"""Calls of roles on a real Ray Serve: what a caller gets while there is no replica."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from support.ray_cluster import start_ray

from elastic_rl import config
from elastic_rl.errors import EtcdUnavailable, RoleUnavailable
from elastic_rl.roles.role_clients import RoleClients

REWARDS = [[1.0, 0.0]]


class Advantages:
    async def compute(self, rewards: list[list[float]]) -> list[list[float]]:
        return rewards


@pytest.fixture(scope="module", autouse=True)
def serving() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # for the workers, which import the tests' role
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        start_ray(4)
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()
    ray.shutdown()


def _deployed(name: str, **resources: float) -> DeploymentHandle:
    role = serve.deployment(Advantages).options(name=name, ray_actor_options={"num_cpus": 0.1, "resources": resources})
    serve.run_many([serve.RunTarget(role.bind(), name=name, route_prefix=None)],
                   wait_for_ingress_deployment_creation=True, wait_for_applications_running=False)
    return serve.get_app_handle(name)


def test_role_without_a_replica_is_away_long_before_a_calls_limit() -> None:
    handle = _deployed("without-room", nowhere=1.0)
    cfg = config.parse({"engine": {"request_timeout_s": 3600.0, "drain_timeout_s": 3600.0}})
    with pytest.raises(RoleUnavailable, match="role advantages has no replica"):
        RoleClients({"advantages": handle}, cfg, lambda role: False, int).advantages(REWARDS)


def test_call_waits_for_a_replica_that_is_registered_or_unknown() -> None:
    handle = _deployed("without-room", nowhere=1.0)
    cfg = config.parse({"engine": {"request_timeout_s": 1.0}, "rollout": {"max_attempts": 4}})
    looks = 0

    def has_replica(role: str) -> bool:
        nonlocal looks
        looks += 1
        if looks % 2:
            raise EtcdUnavailable("no member answers")
        return True

    with pytest.raises(RoleUnavailable, match="did not answer within 5 s"):
        RoleClients({"advantages": handle}, cfg, has_replica, int).advantages(REWARDS)
    assert looks


def test_call_is_answered_by_a_replica() -> None:
    clients = RoleClients({"advantages": _deployed("working")}, config.parse({}), lambda role: True, int)
    assert clients.advantages(REWARDS) == REWARDS
