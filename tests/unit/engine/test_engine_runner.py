"""An engine's runner while etcd, the router or its server fails in the middle of an update or of its departure."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.engine.fetch_failures import FetchFailures
from elastic_rl.engine.lifecycle import EngineLifecycle
from elastic_rl.engine.runner import EngineRunner, ReportedLoad, _Leaves
from elastic_rl.engine.server.probe import Load
from elastic_rl.engine.server.sglang_server import StagedUpdate
from elastic_rl.engine.update_turns import UpdateTurn
from elastic_rl.errors import ChunkCorrupt, ChunkMissing, EngineFailed, EtcdUnavailable, NodeUnavailable
from elastic_rl.etcd.records import EngineState
from elastic_rl.host.paths import JobPaths
from elastic_rl.runtime.backoff import RetryBackoff


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
    """The runner of an engine that serves version 1, without a server, etcd and a router."""
    monkeypatch.setattr("elastic_rl.engine.runner._TURN_RETRY_S", (0.001, 0.001))
    made: Any = EngineRunner.__new__(EngineRunner)
    made._id, made._router_url, made._external, made._unwritten = "a", "", False, False
    made._lifecycle = EngineLifecycle().up().begin(1).verified(1).routed()
    made._needs = made._unfetchable_version = 0
    made._drain, made._hurry, made._stop = threading.Event(), threading.Event(), threading.Event()
    made._member = SimpleNamespace(progress=lambda *_: None)
    made._cfg = SimpleNamespace(drain_timeout_s=60.0, drain_mode="hand_over")
    made._ctx = SimpleNamespace(config=SimpleNamespace(deterministic=False))
    made._others_serve = lambda: True
    return made


def no_etcd() -> Exception:
    return EtcdUnavailable("etcd is away")


def test_load_that_changes_all_the_time_is_written_seldom_and_its_loss_at_once(runner: Any) -> None:
    written: list[tuple[int, bool]] = []
    runner._load, runner._next_load = ReportedLoad(), 0.0
    runner._server = SimpleNamespace(load=None)
    runner._write = lambda: written.append((runner._load.running, runner._load.known))
    for now in range(12):
        runner._server.load = Load(running=now)
        runner._update_load(float(now))
    runner._server.load = None
    runner._update_load(12.0)
    runner._server.load = Load(running=12)
    runner._update_load(12.5)
    assert written == [(0, True), (5, True), (10, True), (10, False), (12, True)]


def test_version_without_a_sound_copy_is_in_the_record_until_a_pull_ends_otherwise(runner: Any) -> None:
    written: list[int] = []
    runner._unfetchable_version, runner._fetch_failures = 0, FetchFailures(60.0, min_failures=100)
    runner._write = lambda: written.append(runner._unfetchable_version)
    for error in (NodeUnavailable("away"), ChunkMissing("gone"), ChunkCorrupt("bits"), NodeUnavailable("away")):
        runner._on_fetch_failed(SimpleNamespace(number=7), error)
    assert written == [7, 0]


@pytest.mark.parametrize(("target", "written"), [(7, []), (8, [0])])
def test_version_without_a_sound_copy_is_not_in_the_record_while_another_one_is_pulled(
        runner: Any, target: int, written: list[int]) -> None:
    saved: list[int] = []
    runner._unfetchable_version = 7
    runner._write = lambda: saved.append(runner._unfetchable_version)

    def staged(*_: Any) -> Any:
        raise _Leaves

    runner._staged = staged
    assert runner._update(None, SimpleNamespace(number=target, meta={}))
    assert saved == written


class Pulls:
    """A puller of a version that is loaded in place, whose node ends after so many confirmations."""

    def __init__(self, confirmed: int) -> None:
        self.confirmed, self.number = confirmed, 0

    @contextlib.contextmanager
    def pull(self, *_: Any, **__: Any) -> Iterator[Any]:
        yield self

    def reference(self) -> dict[str, Any]:
        return {}

    def confirm(self) -> None:
        self.confirmed -= 1
        if self.confirmed < 0:
            raise NodeUnavailable("the node has ended")


@pytest.mark.parametrize(("version", "external", "again"), [(0, False, True), (0, True, False), (1, False, False)])
def test_first_load_that_cannot_be_confirmed_is_made_again_and_no_later_one(
        runner: Any, version: int, external: bool, again: bool) -> None:
    applied: list[int] = []
    runner._lifecycle = EngineLifecycle().up().begin(1).verified(1) if version else EngineLifecycle().up()
    runner._external, runner._turn, runner._cfg.pause_mode = external, None, "abort"
    runner._fetch_failures = FetchFailures(60.0, min_failures=100)
    runner._server = SimpleNamespace(
        apply=lambda update, number: applied.append(number),
        stage=lambda: contextlib.nullcontext(SimpleNamespace(finish=lambda _: StagedUpdate({"reference": {}}, []))))
    runner._monitor = SimpleNamespace(paused=contextlib.nullcontext)
    runner._write = runner._write_soon = lambda *_: True
    runner._before_routing = runner._join_router = lambda: True
    target = SimpleNamespace(stream="policy", number=7, meta={})
    if not again:
        with pytest.raises(EngineFailed, match="may have changed"):
            runner._update(Pulls(1), target)
        return
    assert not runner._update(Pulls(1), target)
    assert (runner._lifecycle.version, runner._lifecycle.applying) == (0, 0)
    assert runner._update(Pulls(9), target) and runner._lifecycle.version == 7 and applied == [7, 7]


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
    assert runner._await_turn(UpdateTurn(slots))  # type: ignore[arg-type]
    assert slots.claim.calls == 4 and not runner._awaits_turn


@pytest.fixture
def updating(runner: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose updates are staged and applied at once; ``staged`` and ``applied``: the versions."""
    monkeypatch.setattr("elastic_rl.engine.runner._TURN_S", 0.001)
    runner._turn = None
    runner.applied, runner.staged = list[int](), list[int]()

    @contextlib.contextmanager
    def staged(puller: Any, target: Any) -> Any:
        runner.staged.append(target.number)
        yield SimpleNamespace(request={}, checksums=["sum"]), None

    runner._staged, runner._look_after, runner._write = staged, Flaky([], None), Flaky([], True)
    runner._join_router, runner._fetch_failures = Flaky([], True), FetchFailures(1.0, min_failures=1)
    runner._cfg.pause_mode = "retract"
    runner._monitor = SimpleNamespace(paused=contextlib.nullcontext)
    runner._server = SimpleNamespace(apply=lambda update, version: runner.applied.append(version))
    return runner


def version(number: int) -> Any:
    return SimpleNamespace(number=number, meta={})


def test_engine_applies_what_it_has_staged_however_fast_versions_come(updating: Any) -> None:
    slots = OneSlot()
    slots.count, slots.claim = Flaky([], 1), Flaky([], False, False, False, True)
    updating._turn = UpdateTurn(slots)  # type: ignore[arg-type]
    assert updating._sync(None, version(2))
    assert (updating.staged, updating.applied, updating._lifecycle.version) == ([2], [2], 2)
    assert slots.free.calls == 1


@pytest.mark.parametrize("leave", ["_drain", "_stop"])
def test_engine_that_is_to_leave_ends_its_pull(updating: Any, leave: str) -> None:
    parts = list[int]()

    @contextlib.contextmanager
    def pull(stream: str, number: int, *, on_part: Any) -> Any:
        on_part(1)
        getattr(updating, leave).set()
        on_part(2)
        yield pytest.fail("it pulls on")

    updating._staged = EngineRunner._staged.__get__(updating)
    updating._server.stage = lambda: contextlib.nullcontext(SimpleNamespace(add=parts.append))
    target = SimpleNamespace(number=2, meta={}, stream="policy")
    assert updating._sync(SimpleNamespace(pull=pull), target), "nothing has failed"
    assert parts == [1] and updating.applied == [] and updating._lifecycle.version == 1


def test_engine_without_etcd_pauses_not_before_it_has_its_turn_and_serves_until_then(updating: Any) -> None:
    slots, away = OneSlot(), 20
    slots.count = Flaky([], 1)

    def claim(slot: int) -> bool:
        nonlocal away
        assert not updating.applied and updating._lifecycle.state is EngineState.READY
        if away:
            away -= 1
            raise no_etcd()
        return True

    slots.claim = claim  # type: ignore[assignment]
    updating._turn = UpdateTurn(slots)  # type: ignore[arg-type]
    assert updating._sync(None, version(2))
    assert not away and updating.applied == [2]


def test_engine_that_is_to_leave_while_it_waits_for_its_turn_applies_nothing(updating: Any) -> None:
    slots = OneSlot()
    slots.count, slots.claim = Flaky([], 1), Flaky([], False)
    updating._look_after = lambda: slots.claim.calls and updating._drain.set()
    updating._turn = UpdateTurn(slots)  # type: ignore[arg-type]
    assert updating._sync(None, version(2))
    assert not updating.applied and not updating._lifecycle.applying


def test_engine_that_is_to_leave_while_it_finishes_requests_for_an_update_does_not_finish_them_all_first(
        updating: Any) -> None:
    updating._turn, updating._cfg.pause_mode = None, "drain"
    looks = 0

    def in_flight() -> int:
        nonlocal looks
        looks += 1
        assert looks < 20, "it still waits for its requests"
        updating._drain.set()
        return 1

    updating._server.in_flight = in_flight
    assert updating._sync(None, version(2))
    assert not updating.applied


class BusyServer(FlakyServer):
    """Whose requests end by an abort alone."""

    def __init__(self) -> None:
        self.requests, self.failures = 2, set[str]()


def test_engine_whose_host_ends_hands_over_at_once_also_where_no_other_serves(
        runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.engine.departure.SETTLE_S", 0.0)
    runner._server, runner._write, runner._others_serve = BusyServer(), Flaky([], True), lambda: False
    runner._cfg.drain_timeout_s = 3600.0
    runner.hurry()
    assert runner._finish_requests() == 2


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


def test_engine_that_is_given_up_does_not_keep_the_turn_of_others_and_waits_for_none(updating: Any) -> None:
    slots = OneSlot()
    slots.count, slots.claim = Flaky([], 1), Flaky([], False)

    def told() -> None:  # its record says so
        updating._needs, updating._lifecycle = 2, updating._lifecycle.given_up()

    updating._look_after = told
    updating._turn = UpdateTurn(slots)  # type: ignore[arg-type]
    assert updating._sync(None, version(2))
    assert updating.applied == [2] and not slots.claim.calls
    updating._turn.begin()
    slots.claim = Flaky([], True)
    assert updating._turn.take(0.0)
    freed = slots.free.calls
    updating._end_turn()
    assert slots.free.calls == freed + 1, "it may be out for long"


def test_engine_that_is_given_up_finishes_its_requests_before_it_updates_where_a_sample_is_of_one_version(
        updating: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.engine.departure.SETTLE_S", 0.0)
    updating._cfg.pause_mode, updating._needs = "drain", 2
    updating._lifecycle = updating._lifecycle.given_up()
    in_flight = [0, 1, 2]

    def look() -> int:
        assert not updating.applied
        return in_flight.pop() if len(in_flight) > 1 else 0

    updating._server.in_flight = look
    assert updating._sync(None, version(2))
    assert updating.applied == [2] and len(in_flight) == 1


def test_engine_that_is_given_up_joins_no_router_before_it_has_what_the_run_needs(runner: Any) -> None:
    runner._route_retry = RetryBackoff(0.1, 0.1)
    runner._lifecycle, runner._needs = runner._lifecycle.given_up(), 2
    assert not runner._join_router() and runner._lifecycle.state is EngineState.SYNCING
    assert not runner._is_away, "it may be away for long, and the others must have their turns"


def test_server_that_is_frozen_is_condemned_with_the_file_of_its_stacks(runner: Any, tmp_path: Path) -> None:
    runner._ctx = SimpleNamespace(config=config.parse({"job": "j", "run_dir": str(tmp_path)}), host="h1")
    condemned: list[str] = []
    with subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"],
                          stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        runner._server = SimpleNamespace(pids=[server.pid], condemn=condemned.append)
        runner._on_frozen("no sign of life for 20 s")
        server.kill()
    [path] = JobPaths.of(runner._ctx.config).hangs.iterdir()
    assert condemned == [f"no sign of life for 20 s; its stacks: {path} on h1"] and "<module>" in path.read_text()


def test_server_that_is_frozen_is_condemned_whatever_becomes_of_its_stacks(runner: Any) -> None:
    condemned: list[str] = []
    runner._server = SimpleNamespace(pids=[1], condemn=condemned.append)
    runner._ctx = None  # no folder for them can be found
    with pytest.raises(AttributeError):
        runner._on_frozen("no sign of life for 20 s")
    assert condemned == ["no sign of life for 20 s"]


def test_external_server_that_is_frozen_has_no_stacks(runner: Any) -> None:
    condemned: list[str] = []
    runner._server = SimpleNamespace(pids=[], condemn=condemned.append)
    runner._on_frozen("no sign of life for 20 s")
    assert condemned == ["no sign of life for 20 s"]
