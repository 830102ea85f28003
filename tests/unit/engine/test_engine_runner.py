"""An engine's runner while etcd, the router or its server fails in the middle of an update or of its departure."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_rl.engine.lifecycle import EngineLifecycle
from elastic_rl.engine.runner import EngineRunner
from elastic_rl.engine.update_turns import UpdateTurn
from elastic_rl.errors import EngineFailed, EtcdUnavailable


class Flaky:
    """A function that raises the errors first, and then gives the values, the last one again and again."""

    def __init__(self, errors: list[Exception], *values: Any) -> None:
        self.errors, self.values, self.calls = list(errors), list(values), 0

    def __call__(self, *_: object, **__: object) -> Any:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.values.pop(0) if len(self.values) > 1 else self.values[0]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of an engine that serves version 1, without a server, etcd and a router."""
    monkeypatch.setattr("elastic_rl.engine.runner._TURN_RETRY_S", (0.001, 0.001))
    made: Any = EngineRunner.__new__(EngineRunner)
    made._id, made._router_url, made._external, made._unwritten = "a", "", False, False
    made._lifecycle = EngineLifecycle().up().begin(1).verified(1).routed()
    made._drain, made._stop = threading.Event(), threading.Event()
    made._member = SimpleNamespace(progress=lambda *_: None)
    made._cfg = SimpleNamespace(drain_timeout_s=60.0, drain_mode="hand_over")
    made._ctx = SimpleNamespace(config=SimpleNamespace(deterministic=False))
    made._others_serve = lambda: True
    return made


def no_etcd() -> Exception:
    return EtcdUnavailable("etcd is away")


class FlakyServer:
    """Has two requests in flight until they are aborted; the first call of each kind fails."""

    def __init__(self) -> None:
        self.requests, self.failures = 2, {"loads", "abort"}

    def alive(self) -> bool:
        return True

    def fail_first(self, call: str) -> None:
        if call in self.failures:
            self.failures.remove(call)
            raise EngineFailed(f"{call}: HTTP 503")

    def in_flight(self) -> int:
        self.fail_first("loads")
        return self.requests

    def abort_requests(self) -> None:
        self.fail_first("abort")
        self.requests = 0


def test_engine_hands_over_without_etcd_and_after_failed_calls_of_its_server(
        runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.engine.departure._ABORT_AGAIN_S", 0.0)
    monkeypatch.setattr("elastic_rl.engine.departure.SETTLE_S", 0.0)
    runner._server, runner._write = FlakyServer(), Flaky([no_etcd()], True)
    assert runner._finish_requests() == 2
    assert not runner._server.requests and not runner._server.failures


def test_engine_whose_server_ends_while_it_leaves_has_failed(runner: Any) -> None:
    runner._write = Flaky([], True)
    runner._server = SimpleNamespace(in_flight=Flaky([EngineFailed("refused")], 0), alive=lambda: False)
    with pytest.raises(EngineFailed, match="refused"):
        runner._finish_requests()


class OneSlot:
    def __init__(self) -> None:
        self.count, self.claim, self.free = Flaky([no_etcd()], 1), Flaky([no_etcd()] * 2, False, True), Flaky([], None)


def test_engine_waits_for_its_turn_through_an_outage_of_etcd(runner: Any) -> None:
    slots = OneSlot()
    runner._look_after = Flaky([no_etcd()], None)
    heads = SimpleNamespace(get=Flaky([no_etcd()], None))
    assert runner._await_turn(UpdateTurn(slots), heads) is None  # type: ignore[arg-type]
    assert slots.claim.calls == 4 and not runner._awaits_turn


def test_turn_lasts_until_the_router_has_the_engine_again_or_it_leaves(runner: Any) -> None:
    slots = OneSlot()
    slots.count, slots.claim = Flaky([], 1), Flaky([], True)
    runner._turn = UpdateTurn(slots)  # type: ignore[arg-type]
    for back in (lambda: setattr(runner, "_lifecycle", runner._lifecycle.routed()), runner._drain.set):
        runner._turn.begin()
        assert runner._turn.take(0.0)
        runner._lifecycle = runner._lifecycle.unrouted()
        freed = slots.free.calls
        runner._end_turn()
        assert slots.free.calls == freed
        back()
        runner._end_turn()
        assert slots.free.calls == freed + 1
