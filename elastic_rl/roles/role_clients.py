"""Clients of the roles that the actor calls: bounded, and sent to another replica when one was replaced."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from elastic_rl.config import Config
from elastic_rl.engine.generation import Generated, PromptRequest
from elastic_rl.errors import ConfigError, ElasticRLError, EngineFailed, PluginFailed, RoleUnavailable
from elastic_rl.plugins import describe, text_of
from elastic_rl.roles.rollout import GenerationRequest

log = logging.getLogger(__name__)


_OWN_S = 60.0
"""What the role may take besides the user's function: its process may have to be replaced."""


def call_timeout_s(cfg: Config) -> float:
    """Limit of one call, in seconds: more than the rollout role takes to give a prompt group up."""
    engines = cfg.engine.request_timeout_s * (cfg.rollout.max_attempts + 1)
    return max(engines, cfg.rollout.generate_timeout_s + _OWN_S) if ":" in cfg.rollout.generate else engines


class RoleClients:
    """Handles of the stateless roles. Thread-safe. Each call is idempotent: whoever gets an error may call again."""

    def __init__(self, handles: Mapping[str, DeploymentHandle], timeout_s: float) -> None:
        """``handles``: by role; a job without engines has none of these roles. ``timeout_s``: of one call."""
        self._handles, self._timeout_s = handles, timeout_s

    def generate(self, prompts: Sequence[PromptRequest], min_version: int) -> list[Generated]:
        """Samples of every prompt, or why the user's function failed for it. Raises EngineFailed, RoleUnavailable, and
        PluginFailed for prompts that cannot be sent."""
        request = GenerationRequest(tuple(prompts), min_version)
        return self._call("rollout", lambda handle: handle.generate.remote(request))

    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        """Advantages of rewards [groups, samples]. Raises as ``generate``."""
        return self._call("advantages", lambda handle: handle.compute.remote(rewards))

    def _call(self, role: str, send: Callable[[DeploymentHandle], DeploymentResponse]) -> Any:
        response: DeploymentResponse | None = None
        try:
            response = send(self._handles[role])
            return response.result(timeout_s=self._timeout_s)
        except TimeoutError as e:
            if response is not None:
                response.cancel()  # nobody waits for it any more
            raise RoleUnavailable(f"role {role} did not answer within {self._timeout_s:g} s",
                                   hint=f"`elastic-rl restart roles/{role}` replaces it") from e
        except RayTaskError as e:
            if isinstance(e.cause, PluginFailed | ConfigError):  # a setting of the user's names what does not fit
                raise PluginFailed(e.cause.message, hint=e.cause.hint) from e
            if isinstance(e.cause, ElasticRLError):
                raise EngineFailed(f"role {role}: {e.cause.message}", hint=e.cause.hint) from e
            raise EngineFailed(f"role {role} failed: {_last_line(e)}") from e
        except (TypeError, pickle.PicklingError) as e:
            raise PluginFailed(f"a prompt cannot be sent to role {role}: {describe(e)}",
                               hint="metadata of prompts must be plain values") from e
        except (RayActorError, RayServeException, RayError) as e:
            reason = str(e).partition("\n")[0][:200]
            raise RoleUnavailable(f"role {role} is away: {type(e).__name__}: {reason}") from e
        except Exception as e:
            if response is not None:
                raise RoleUnavailable(f"the answer of role {role} cannot be read: {describe(e)}") from e
            # What a user's metadata raise while they are written.
            raise PluginFailed(f"role {role} cannot be called: {describe(e)}",
                               hint="metadata of prompts must be plain values") from e


def _last_line(error: RayTaskError) -> str:
    """What the remote traceback ends with."""
    return (text_of(error)[-2000:].splitlines() or [type(error).__name__])[-1]
