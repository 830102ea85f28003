"""Roles are deployed by the newest driver alone; Serve is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.config import RoleConfig
from elastic_rl.driver import role_deployments
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
