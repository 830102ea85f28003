"""Clients of the roles that the actor calls: bounded, and retried when a replica was replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from elastic_rl.engine.client import Sample
from elastic_rl.errors import DeadlineExceeded, ElasticRLError, EngineFailed
from elastic_rl.roles.rollout import GenerationRequest

log = logging.getLogger(__name__)


class RoleClients:
    """Handles of the stateless roles. Each call is idempotent, so it is retried when a replica is lost."""

    attempts = 4

    def __init__(self, *, rollout: DeploymentHandle, advantages: DeploymentHandle, timeout_s: float) -> None:
        self._rollout = rollout
        self._advantages = advantages
        self._timeout_s = timeout_s

    def generate(self, request: GenerationRequest) -> list[list[Sample]]:
        """Samples of every prompt. Raises EngineFailed when the attempts are used up, and DeadlineExceeded."""
        return self._call("rollout", lambda: self._rollout.generate.remote(request))

    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        """Advantages of rewards [groups, samples]. Raises as ``generate``."""
        return self._call("advantages", lambda: self._advantages.compute.remote(rewards))

    def _call(self, role: str, send: Callable[[], DeploymentResponse]) -> Any:
        last: Exception | None = None
        for attempt in range(1, self.attempts + 1):
            try:
                return send().result(timeout_s=self._timeout_s)
            except TimeoutError as e:
                raise DeadlineExceeded(f"role {role} did not answer within {self._timeout_s:g} s") from e
            except RayTaskError as e:
                cause = e.cause if isinstance(e.cause, ElasticRLError) else None
                if cause is None or not cause.retryable:
                    raise EngineFailed(f"role {role} failed: {e}") from e
                last = cause
            except (RayActorError, RayServeException, RayError) as e:
                last = e
            log.warning("role %s, attempt %d of %d: %s", role, attempt, self.attempts, last)
        raise EngineFailed(f"role {role} failed {self.attempts} times: {last}") from last
