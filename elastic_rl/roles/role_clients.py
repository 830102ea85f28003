"""Clients of the roles that the actor calls: bounded, and sent to another replica when one was replaced."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from elastic_rl.config import ROLLOUT_POOL, Config
from elastic_rl.engine.generation import Answers, PromptRequest
from elastic_rl.engine.scoring import ScoreRequest, TokenScores
from elastic_rl.environments.episode_time import WAITS
from elastic_rl.errors import (
    ConfigError,
    ElasticRLError,
    EngineFailed,
    EtcdUnavailable,
    Fenced,
    PluginFailed,
    RoleUnavailable,
)
from elastic_rl.plugins.user_code import describe, text_of
from elastic_rl.rewards.judging import Judgement, JudgeRequest
from elastic_rl.roles.rollout import GenerationRequest, decoded

log = logging.getLogger(__name__)
T = TypeVar("T")

_OWN_S = 60.0
"""What the role may take besides the user's function: its process may have to be replaced."""
_LOOK_S = 1.0
"""Interval between looks for a replica while Serve finds none for a call."""
_ABSENT_S = 3.0
"""A role without a replica for so long is away: Serve would hold its calls back until they are over their limit."""


def call_timeout_s(cfg: Config) -> float:
    """Limit of one call, in seconds: more than the rollout role takes to give a prompt group up.

    An episode asks the engines once a turn, and ``rollout.generate_timeout_s`` bounds the environment twice, once while
    the episode begins and once in its steps; it may wait ``WAITS`` times as long. It is played again, up to
    ``rollout.max_attempts`` times, where engines served an older version than the one asked for. That may be hours; a
    role that has died is found much sooner (Ray), as is a process of the environment that does not answer
    (``OwnGenerate.within``).
    """
    rollout, engines = cfg.rollout, _pool_timeout_s(cfg, ROLLOUT_POOL)
    if rollout.plays_episodes:
        return rollout.max_attempts * (rollout.max_turns * engines + (2 + WAITS) * rollout.generate_timeout_s) + _OWN_S
    return max(engines, rollout.generate_timeout_s + _OWN_S) if rollout.generates_apart else engines


def _pool_timeout_s(cfg: Config, pool: str) -> float:
    settings = cfg.pool_settings("").get(pool)
    return settings.call_timeout_s(cfg.rollout.max_attempts) if settings else cfg.engine.request_timeout_s


@dataclass
class _Call:
    """One call of a role."""

    role: str
    limit_s: float
    response: DeploymentResponse | DeploymentResponseGenerator | None = None

    def cancel(self) -> None:
        """Ends the call: nobody waits for it any more."""
        if self.response is not None:
            self.response.cancel()

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Inside, whatever Ray and Serve raise becomes an error as ``RoleClients`` raises it."""
        role = self.role
        try:
            yield
        except RoleUnavailable:
            raise
        except TimeoutError as e:
            self.cancel()
            raise RoleUnavailable(f"role {role} did not answer within {self.limit_s:g} s",
                                   hint=f"`elastic-rl restart roles/{role}` replaces it") from e
        except RayTaskError as e:
            if isinstance(e.cause, PluginFailed | ConfigError):  # a setting of the user's names what does not fit
                raise PluginFailed(e.cause.message, hint=e.cause.hint) from e
            if isinstance(e.cause, Fenced):
                raise Fenced(e.cause.message, hint=e.cause.hint) from e
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
            if self.response is not None:
                raise RoleUnavailable(f"the answer of role {role} cannot be read: {describe(e)}") from e
            # What a user's metadata raise while they are written.
            raise PluginFailed(f"role {role} cannot be called: {describe(e)}",
                               hint="metadata of prompts must be plain values") from e


class RoleClients:
    """Handles of the stateless roles. Thread-safe. Each call is idempotent: whoever gets an error may call again."""

    def __init__(self, handles: Mapping[str, DeploymentHandle], cfg: Config, has_replica: Callable[[str], bool],
                 term: Callable[[], int]) -> None:
        """``handles``: the handles of the roles that the job has. ``has_replica``: whether a replica of a role is
        registered; raises EtcdUnavailable. ``term``: the term of the actor that calls."""
        self._handles, self._has_replica, self._term = handles, has_replica, term
        self._cfg, self._timeout_s = cfg, call_timeout_s(cfg)
        self._lock = threading.Lock()
        self._streams: dict[str, DeploymentHandle] = {}
        """Handles whose calls answer as streams, by role; guarded by the lock."""

    def generate(self, prompts: Sequence[PromptRequest], min_version: int, in_probation: bool = False
                 ) -> Iterator[Answers]:
        """Yields samples of every prompt, or why there are none, as they come, and an empty list now and then, so that
        who has forgotten the request can close it. ``in_probation``: see
        ``GenerationRequest``. Raises EngineFailed, RoleUnavailable, PluginFailed for prompts that cannot be sent, and
        Fenced when a later term of the actor has begun; what was yielded before is good. Closed, it cancels the call.
        """
        request = GenerationRequest(tuple(prompts), min_version, in_probation)
        return self._stream("rollout", lambda handle: handle.generate.remote(request, self._term()), decoded, [])

    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        """Advantages of rewards [groups, samples]. Raises as ``generate``."""
        return self._call("advantages", lambda handle: handle.compute.remote(rewards))

    def token_advantages(self, batch: bytes) -> np.ndarray:
        """Advantages [L] fp32 of a batch in safetensors. Raises as ``generate``."""
        return self._call("advantages", lambda handle: handle.compute_of_tokens.remote(batch))

    def score(self, sequences: Sequence[ScoreRequest], top: int) -> list[TokenScores]:
        """What the teacher makes of each sequence. Raises as ``generate``."""
        return self._call("teacher", lambda handle: handle.score.remote(list(sequences), top, self._term()),
                          _pool_timeout_s(self._cfg, self._cfg.algorithm.teacher or ""))

    def judge(self, request: JudgeRequest) -> list[Judgement]:
        """What the judge model makes of each response. Raises as ``generate``."""
        return self._call("genrm", lambda handle: handle.judge.remote(request, self._term()),
                          _pool_timeout_s(self._cfg, request.options.pool))

    def _call(self, role: str, send: Callable[[DeploymentHandle], DeploymentResponse],
              timeout_s: float | None = None) -> Any:
        call = _Call(role, self._timeout_s if timeout_s is None else timeout_s)
        with call.translated():
            end = time.monotonic() + call.limit_s
            call.response = response = send(self._handles[role])
            self._await_replica(call, response._to_object_ref_sync, end)
            return response.result(timeout_s=max(0.0, end - time.monotonic()))

    def _stream(self, role: str, send: Callable[[DeploymentHandle], DeploymentResponseGenerator],
                read: Callable[[Any], T], nothing: T) -> Iterator[T]:
        """Yields what ``read`` makes of all that the call gives, and ``nothing`` after each second without. The limit
        of a call holds for each of these, since some of what it asks for may wait in the role for the rest."""
        call = _Call(role, self._timeout_s)
        end = time.monotonic() + call.limit_s
        with call.translated():
            call.response = response = send(self._streaming(role))
            items = self._await_replica(call, response._to_object_ref_gen_sync, end)
        try:
            while True:
                with call.translated():
                    try:
                        item = items._next_sync(max(0.0, min(_LOOK_S, end - time.monotonic())))
                    except StopIteration:
                        return
                    if item.is_nil() and time.monotonic() >= end:
                        raise TimeoutError
                    found = nothing
                    if not item.is_nil():
                        found = read(ray.get(item, timeout=max(0.0, end - time.monotonic())))
                        end = time.monotonic() + call.limit_s
                yield found
        except BaseException:  # GeneratorExit too: nobody waits for the rest
            call.cancel()
            raise

    def _streaming(self, role: str) -> DeploymentHandle:
        """The role's handle for calls that stream. Serve fails where two threads make the first one."""
        with self._lock:
            if role not in self._streams:
                self._streams[role] = self._handles[role].options(stream=True)
            return self._streams[role]

    def _await_replica(self, call: _Call, assigned: Callable[[float], T], end: float) -> T:
        """What ``assigned`` returns within so many seconds once a replica has the call, which may wait for one that is
        busy. Raises RoleUnavailable when there is none, TimeoutError after ``end`` (monotonic), and what Serve raises.
        """
        seen_at = time.monotonic()
        while True:
            left_s = end - time.monotonic()
            try:
                return assigned(max(0.0, min(left_s, _LOOK_S)))
            except TimeoutError:
                if left_s <= _LOOK_S:
                    raise
            if self._may_have_replica(call.role):
                seen_at = time.monotonic()
            elif time.monotonic() - seen_at >= _ABSENT_S:
                call.cancel()
                raise RoleUnavailable(f"role {call.role} has no replica", hint=f"`elastic-rl members --role "
                                      f"{call.role}`; Serve starts another one as soon as there is room for it")

    def _may_have_replica(self, role: str) -> bool:
        try:
            return self._has_replica(role)
        except EtcdUnavailable:
            return True  # nobody can say


def _last_line(error: RayTaskError) -> str:
    """What the remote traceback ends with."""
    return (text_of(error)[-2000:].splitlines() or [type(error).__name__])[-1]
