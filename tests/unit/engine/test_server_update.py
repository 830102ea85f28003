"""What a server is asked for when its weights change, in each way to pause it. Its answers are given."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from elastic_rl.config import EngineConfig
from elastic_rl.engine.server.external_server import ExternalServer
from elastic_rl.engine.server.sglang_server import SGLangServer, StagedUpdate
from elastic_rl.errors import EngineFailed


class Asked:
    """A server that notes what it is asked for, and reports a version."""

    def __init__(self, pause_mode: str, reports: int, server: type[ExternalServer] = ExternalServer) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._reports = reports
        self.server = server("http://127.0.0.1:1", "model", cfg=EngineConfig(pause_mode=pause_mode))
        self.server._http = httpx.Client(transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.calls.append((request.url.path, json.loads(request.content or b"{}")))
        return httpx.Response(200, json={"weight_version": str(self._reports)})


@pytest.mark.parametrize(("mode", "asked_for", "drops_cache"), [
    ("retract", "retract", True), ("abort", "abort", True), ("drain", "retract", True),
    ("in_place", "in_place", False)])
def test_weights_change_in_one_call_within_a_pause(mode: str, asked_for: str, drops_cache: bool) -> None:
    """Requests that stay in place need the cache that they have; all others must not meet one of older weights."""
    asked = Asked(mode, reports=7)
    asked.server.apply(StagedUpdate({"ticket": "t"}, ["sum"]), 7)
    assert [path for path, _ in asked.calls] == [
        "/pause_generation", "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update",
        "/continue_generation", "/model_info"]
    update = dict(asked.calls)["/update_weights_from_tensor"]
    assert dict(asked.calls)["/pause_generation"] == {"mode": asked_for}
    assert (update["weight_version"], update["flush_cache"]) == ("7", drops_cache)


def test_what_an_own_engine_still_has_after_a_drain_is_given_back_and_not_continued_by_other_weights() -> None:
    class Own(ExternalServer):
        _pause_of_drain = SGLangServer._pause_of_drain

    asked = Asked("drain", 7, Own)
    asked.server.apply(StagedUpdate({"ticket": "t"}, ["sum"]), 7)
    assert dict(asked.calls)["/pause_generation"] == {"mode": "abort"}


def test_update_fails_when_the_server_reports_another_version_after_it() -> None:
    with pytest.raises(EngineFailed, match="reports version 6 after version 7"):
        Asked("retract", reports=6).server.apply(StagedUpdate({"ticket": "t"}, ["sum"]), 7)
