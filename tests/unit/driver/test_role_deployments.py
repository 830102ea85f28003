"""Roles are deployed by the newest driver alone; Serve is a stand-in."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.config import RoleConfig
from elastic_rl.driver import compute, role_deployments
from elastic_rl.driver.compute import ComputePlane
from elastic_rl.driver.role_deployments import RoleDeployments
from elastic_rl.errors import Fenced
from elastic_rl.roles.registry import ROLES


def test_replica_that_moves_has_the_time_of_a_request_for_its_calls() -> None:
    ctx: Any = SimpleNamespace(config=config.parse({"engine": {"request_timeout_s": 45.0, "drain_timeout_s": 45.0}}))
    roles = RoleDeployments(ctx, {})
    assert {name: roles._finish_s(spec) for name, spec in ROLES.items()} == {
        **dict.fromkeys(("rollout", "advantages", "genrm", "teacher"), 45.0), "actor": 5.0}


@pytest.mark.parametrize("replaced", [False, True])
def test_roles_are_not_deployed_by_a_driver_that_a_newer_one_has_replaced(monkeypatch: pytest.MonkeyPatch,
                                                                          replaced: bool) -> None:
    calls: list[str] = []

    def run_many(targets: list[Any], **_: Any) -> None:
        calls.append("run")
        roles._stopping.set()

    monkeypatch.setattr(role_deployments, "serve", SimpleNamespace(
        status=lambda: SimpleNamespace(applications={}), start=lambda **_: calls.append("start"), run_many=run_many,
        RunTarget=lambda *args, **_: args))
    monkeypatch.setattr(RoleDeployments, "_application", lambda self, spec, selection: spec)

    def require() -> None:
        if replaced:
            raise Fenced("a newer driver has begun")

    roles = RoleDeployments(SimpleNamespace(), {"stub": SimpleNamespace(settings=RoleConfig())}, require)  # type: ignore[arg-type]
    roles.start()
    wait_until(lambda: not roles._thread.is_alive(), what="the end of the thread")
    assert calls == ([] if replaced else ["start", "run"])


class Serve:
    """Stands in for Serve and Ray. ``status``: what a look at it does; ``answers``: whether the controller does;
    ``ended``: set once it has been killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, answers: bool = True) -> None:
        self.calls: list[str] = []
        self.looks, self.ended = threading.Event(), threading.Event()
        self.status: Any = lambda: SimpleNamespace(applications={})
        self._answers = answers
        monkeypatch.setattr(role_deployments, "_JOIN_TIMEOUT_S", 0.2)
        monkeypatch.setattr(role_deployments, "kill_replicas", lambda name: self.calls.append(f"kill {name}"))
        monkeypatch.setattr(role_deployments, "serve", SimpleNamespace(
            status=self._status, start=lambda **_: self.calls.append("start"), RunTarget=lambda *args, **_: args,
            run_many=lambda targets, **_: self.calls.append("run"), shutdown=lambda: self.calls.append("shutdown")))
        controller = SimpleNamespace(graceful_shutdown=SimpleNamespace(remote=lambda wait: self.calls.append("end")))
        monkeypatch.setattr(role_deployments, "ray", SimpleNamespace(
            is_initialized=lambda: True, kill=self._kill, get=self._get, get_actor=lambda name, namespace: controller))
        monkeypatch.setattr(compute, "ray", SimpleNamespace(shutdown=lambda: self.calls.append("disconnect")))
        monkeypatch.setattr(RoleDeployments, "_application", lambda self, spec, selection: spec)
        self.roles = RoleDeployments(SimpleNamespace(), {  # type: ignore[arg-type]
            "stub": SimpleNamespace(settings=RoleConfig(), finishes_calls=False)})

    def _status(self) -> Any:
        self.looks.set()
        return self.status()

    def _get(self, _: None, timeout: float) -> None:
        if not self._answers:
            raise GetTimeoutError

    def _kill(self, controller: Any) -> None:
        self.calls.append("kill")
        self.ended.set()

    def close(self) -> None:
        """Closes the roles as the driver does, once Serve was looked at."""
        self.roles.start()
        assert self.looks.wait(60)
        self.roles.close()
        ComputePlane._disconnect(SimpleNamespace(roles=self.roles))  # type: ignore[arg-type]


def test_serve_that_answers_ends_the_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Serve(monkeypatch)
    serve.status = lambda: SimpleNamespace(applications={"stub": SimpleNamespace(status="RUNNING", message="")})
    serve.close()
    assert serve.calls[-3:] == ["end", "shutdown", "disconnect"] and "kill" not in serve.calls


def test_call_of_serve_that_does_not_end_is_ended_before_ray_is(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Serve(monkeypatch)

    def status() -> None:
        assert serve.ended.wait(60)
        raise RayActorError

    serve.status = status
    serve.close()
    assert serve.calls == ["kill", "kill stub", "disconnect"] and not serve.roles.is_calling


def test_ray_is_not_shut_down_while_a_thread_of_the_driver_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    serve, over = Serve(monkeypatch), threading.Event()
    serve.status = lambda: over.wait(60) and SimpleNamespace(applications={})
    serve.close()
    assert serve.roles.is_calling and serve.calls == ["kill", "kill stub"]
    over.set()
    wait_until(lambda: not serve.roles.is_calling, what="the end of the thread")
    assert serve.calls == ["kill", "kill stub"], "what it has found then is not deployed again"


def test_serve_whose_controller_does_not_answer_is_killed_with_its_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Serve(monkeypatch, answers=False)
    serve.close()
    assert serve.calls[-4:] == ["end", "kill", "kill stub", "disconnect"] and "shutdown" not in serve.calls
