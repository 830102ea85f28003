"""What condemns a server that someone else runs: another version, or refused connections; never slowness."""

from __future__ import annotations

import httpx
import pytest

from elastic_rl.config import EngineConfig
from elastic_rl.engine.server import external_server
from elastic_rl.engine.server.external_server import ExternalServer
from elastic_rl.errors import EngineFailed


class Foreign:
    """A server that answers as told, and what its engine sees of it."""

    def __init__(self) -> None:
        self.version, self.error, self.during = "default", None, lambda: None
        self.asked: list[str] = []
        self.server = ExternalServer("http://127.0.0.1:1", "model", cfg=EngineConfig())
        self.server._probe.http = httpx.Client(transport=httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        self.during()
        if self.error is not None:
            raise self.error
        return httpx.Response(200, json={"weight_version": self.version} if "model" in request.url.path else {})


def test_probe_asks_for_the_version_and_sometimes_for_a_token() -> None:
    foreign = Foreign()
    assert foreign.server.probe() is True
    assert [foreign.server.probe() for _ in range(3)] == [None] * 3
    assert foreign.asked.count("/model_info") == 4 and foreign.asked.count("/health_generate") == 1
    assert foreign.server.alive() and foreign.server.probe_interval_s == 1.0


def test_server_that_reports_another_version_is_dead() -> None:
    foreign = Foreign()
    foreign.server._applied, foreign.version = 7, "7"
    assert foreign.server.probe() and foreign.server.alive()
    foreign.version = "default"
    assert foreign.server.probe() is False and not foreign.server.alive()
    assert "reports version 0 and not 7" in foreign.server.failure


def test_version_that_changes_during_the_probe_is_an_update_of_ours() -> None:
    foreign = Foreign()
    foreign.server._applied, foreign.version = 7, "7"

    def update() -> None:
        foreign.server._applied = 8

    foreign.during = update
    assert foreign.server.probe() is not False and foreign.server.alive()


def test_server_with_another_key_is_started_with_a_key_file() -> None:
    server = Foreign().server
    server._http = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(401, text="Unauthorized")))
    with pytest.raises(EngineFailed, match="401") as refused:
        server.in_flight()
    hint = refused.value.hint
    assert "ELASTIC_RL_ENGINE_KEY_FILE=" in hint and "elastic-rl restart job" in hint and "--api-key" not in hint


def test_server_that_refuses_connections_is_dead_a_slow_one_is_not() -> None:
    foreign = Foreign()
    foreign.error = httpx.ReadTimeout("slow")
    assert [foreign.server.probe() for _ in range(9)] == [False] * 9 and foreign.server.alive()
    foreign.error = httpx.ConnectError("refused")
    seen = []
    while foreign.server.alive():
        foreign.server.probe()
        seen.append(foreign.server.alive())
    assert len(seen) == external_server._MAX_REFUSED and "no longer answers" in foreign.server.failure
