"""A real SGLang server that the test runs itself: the driver serves it as an external engine, and detaches."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from unittest import mock

import httpx
import pytest
import ray
from support.engine_testbed import QUICK, EngineTestbed, ForeignServer, scheduler_of, suspended
from support.ray_cluster import start_ray
from support.tiers import full
from support.waiting import PATIENCE_S, wait_until

from elastic_rl.driver.external_engines import ExternalEngines
from elastic_rl.driver.placement import stop_all
from elastic_rl.engine import actor
from elastic_rl.engine.router import RouterClient
from elastic_rl.engine.runner import EngineRunner
from elastic_rl.engine.server.external_server import ExternalServer
from elastic_rl.etcd.records import Engine, EngineState, ExternalEngine
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.processes import stop

POOL = "rollout"


@pytest.fixture(scope="module")
def foreign(testbed: EngineTestbed) -> Iterator[ForeignServer]:
    testbed.stop_engines()
    server = ForeignServer(testbed)
    wait_until(lambda: version(server), timeout_s=240, what=f"the server (log: {server.log})",
               alive=lambda: server.process.poll() is None)
    yield server
    stop(server.process.pid)
    server.process.wait(60)


@pytest.fixture
def drivers(testbed: EngineTestbed, foreign: ForeignServer) -> Iterator[Callable[[RunContext], ExternalEngines]]:
    """Makes the driver's part for external engines, on Ray."""
    made: list[ExternalEngines] = []

    def make(ctx: RunContext) -> ExternalEngines:
        made.append(ExternalEngines(ctx, testbed.etcd, POOL, unroute=unroute))
        return made[-1]

    def unroute(url: str) -> None:
        """Takes the server out of the router, as the driver's supervisor of it does in its own time."""
        router = RouterClient(testbed.ctx.router_urls["rollout"], access=testbed.access)
        router.request_remove(router.worker_ids().get(url, []))

    start_ray(4)
    yield make
    for each in made:
        detach(each)
    ray.shutdown()


def detach(driver: ExternalEngines) -> None:
    """Ends what the driver has placed, as the end of the driver does."""
    stop_all(driver.placed, timeout_s=10.0)
    driver.forget()


def version(server: ForeignServer) -> str:
    """The version that a server reports; empty when it does not answer."""
    try:
        return str(httpx.get(f"{server.url}/model_info", timeout=2).json()["weight_version"])
    except httpx.HTTPError:
        return ""


def change_version(server: ForeignServer) -> None:
    httpx.post(f"{server.url}/update_weight_version", json={"new_version": "default"}, timeout=5).raise_for_status()


def answers(server: ForeignServer) -> bool:
    body = {"input_ids": [5, 6, 3], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    return bool(httpx.post(f"{server.url}/generate", json=body, timeout=20).json()["output_ids"])


def register(testbed: EngineTestbed, engine: str, url: str) -> None:
    testbed.etcd.put(testbed.keys.external_engine(url), ExternalEngine(engine=engine, pool=POOL, url=url).encode())


def await_ready(testbed: EngineTestbed, driver: ExternalEngines, engine: str) -> Engine:
    def ready() -> Engine | None:
        driver.reconcile({}, testbed.records())
        found = testbed.record(engine)
        serves = found and (found.state, found.version) == (EngineState.READY, testbed.published)
        return found if serves else None

    return wait_until(ready, timeout_s=400, what=f"{engine} at version {testbed.published}")


def await_end(testbed: EngineTestbed, driver: ExternalEngines, url: str) -> str:
    """Why the registration of a server ended, once it has."""
    def reason() -> str:
        driver.reconcile({}, testbed.records())
        found = testbed.etcd.get(testbed.keys.external_engine(url))
        return ExternalEngine.decode(found.value).ended if found else ""

    return wait_until(reason, timeout_s=400, what=f"the end of the engine at {url}")


def kinds(testbed: EngineTestbed, engine: str) -> list[str]:
    return [e.kind for e in testbed.events(engine)]


def test_external_engine_serves_each_version_and_its_server_outlives_the_drain(testbed: EngineTestbed,
                                                                               foreign: ForeignServer) -> None:
    testbed.start_engine("x6", external_url=foreign.url)
    engine = testbed.wait_ready("x6")
    assert engine.external and engine.pid == 0 and engine.url == foreign.url
    assert testbed.workers()[foreign.url]
    testbed.assert_serves()
    testbed.publish(seed=2)
    testbed.wait_ready("x6")
    testbed.assert_serves()
    testbed.runners["x6"].drain()
    testbed.await_end("x6")
    assert foreign.url not in testbed.workers() and testbed.record("x6") is None
    assert kinds(testbed, "x6") == ["engine.ready", "engine.stopped"]
    assert version(foreign) == str(testbed.published) and answers(foreign), "it serves others after the drain"


def test_server_on_another_host_is_refused_and_that_is_no_death(testbed: EngineTestbed) -> None:
    testbed.start_engine("x7", external_url="http://192.0.2.1:9")
    assert "not an address of" in testbed.wait_state("x7", EngineState.DEAD).reason
    testbed.await_end("x7")
    assert kinds(testbed, "x7") == ["engine.refused"]


def test_actor_of_an_external_engine_launches_no_server_and_follows_no_phase(
        testbed: EngineTestbed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of its server is someone else's."""
    for name in ("redirect_output", "freeze_heap", "logs", "traces"):  # of a process of its own
        monkeypatch.setattr(actor, name, mock.MagicMock())
    config = testbed.ctx.config.model_copy(update={"placement": "colocated"})
    made = actor.EngineActor(testbed.ctx.model_copy(update={"config": config}), "x8", POOL, "http://127.0.0.1:9")
    try:
        assert type(made._runner) is EngineRunner and isinstance(made._runner._server, ExternalServer)
        assert made._runner._server.url == "http://127.0.0.1:9"
    finally:
        made.stop()
        made.run()


@full(proved_in="tests/integration/driver/test_parts_on_ray.py tests/integration/engine/test_external_engine.py",
      why="drivers on Ray whose engines have a real server")
def test_external_engine_serves_over_two_drivers_and_its_server_outlives_it(
        testbed: EngineTestbed, foreign: ForeignServer, drivers: Callable[[RunContext], ExternalEngines]) -> None:
    driver = drivers(testbed.ctx)
    register(testbed, "x0", foreign.url)
    engine = await_ready(testbed, driver, "x0")
    assert engine.external and engine.pid == 0 and engine.url == foreign.url
    assert testbed.workers()[foreign.url] and driver.reconcile({}, testbed.records()) == 1
    testbed.assert_serves()
    testbed.publish(seed=2)
    await_ready(testbed, driver, "x0")
    testbed.assert_serves()

    # Its runner is killed: the server is unrouted, and the driver does not serve it again.
    incarnation = testbed.record("x0").incarnation
    driver._served["x0"].placed.kill()
    assert await_end(testbed, driver, foreign.url)
    testbed.await_unrouted(foreign.url)
    assert testbed.record("x0") is None
    assert kinds(testbed, "x0")[-2:] == ["engine.dead", "engine.removed"]
    assert testbed.events("x0")[-2].data["incarnation"] == incarnation
    assert version(foreign) == str(testbed.published)

    # Registered again. The next driver serves it under its own epoch; then it is deregistered, and drained.
    register(testbed, "x1", foreign.url)
    await_ready(testbed, driver, "x1")
    detach(driver)
    assert foreign.url not in testbed.workers() and version(foreign) == str(testbed.published)
    epoch = testbed.raise_epoch()
    driver = drivers(testbed.ctx)
    assert await_ready(testbed, driver, "x1").epoch == epoch
    testbed.etcd.delete(testbed.keys.external_engine(foreign.url))

    def detached() -> bool:
        driver.reconcile({}, testbed.records())
        return not driver._served

    wait_until(detached, what="the end of the drain")
    assert foreign.url not in testbed.workers() and testbed.record("x1") is None
    assert kinds(testbed, "x1")[-1] == "engine.stopped"
    assert version(foreign) == str(testbed.published) and answers(foreign), "it serves others after the drain"

    # A server on another host is refused, and that is no death.
    register(testbed, "x2", "http://192.0.2.1:9")
    assert "not an address of" in await_end(testbed, driver, "http://192.0.2.1:9")
    assert kinds(testbed, "x2") == ["engine.starting", "engine.refused", "engine.removed"]


def test_runner_of_an_older_epoch_touches_nothing_of_its_successor(testbed: EngineTestbed,
                                                                   foreign: ForeignServer) -> None:
    """An external engine keeps its id and its server over drivers, so two runners of it can meet."""
    def await_ready_event(runner: EngineRunner) -> None:
        wait_until(lambda: runner._member.incarnation in {
            e.data["incarnation"] for e in testbed.events("x3") if e.kind == "engine.ready"},
            what="the runner's event engine.ready, which follows its record")

    stale = testbed.start_engine("x3", external_url=foreign.url)
    thread = testbed.threads["x3"]
    testbed.wait_ready("x3")
    await_ready_event(stale)  # before the epoch that would fence it
    testbed.raise_epoch()
    successor = testbed.start_engine("x3", external_url=foreign.url)
    testbed.publish(seed=5)
    wait_until(lambda: testbed.record("x3").incarnation == successor._member.incarnation,
               what="the successor's record")
    testbed.wait_ready("x3")
    await_ready_event(successor)
    before = len(testbed.events("x3"))
    stale.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the stale runner has not ended"
    assert testbed.wait_ready("x3").incarnation == successor._member.incarnation
    assert testbed.workers()[foreign.url]
    testbed.assert_serves()
    assert len(testbed.events("x3")) == before, "a stale runner wrote an event"

    # A leader that reads a late report of the stale runner can tell it from the living one.
    assert {e.data["incarnation"] for e in testbed.events("x3") if e.kind == "engine.ready"} == {
        stale._member.incarnation, successor._member.incarnation}
    successor.stop()
    testbed.await_end("x3")


def test_external_engine_with_stopped_scheduler_is_dead_while_its_server_lives_on(
        testbed: EngineTestbed, foreign: ForeignServer) -> None:
    testbed.start_engine("frozen", external_url=foreign.url, **QUICK)
    testbed.wait_ready("frozen")
    with suspended(scheduler_of(foreign.process.pid).pid):
        assert "no sign of life" in testbed.wait_state("frozen", EngineState.DEAD).reason
        testbed.await_end("frozen")
        assert foreign.url not in testbed.workers()
    [death] = [e for e in testbed.events("frozen") if e.kind == "engine.dead"]
    assert death.data["detect_s"] >= QUICK["frozen_after_s"]
    assert version(foreign) == str(testbed.published) and answers(foreign)


def test_external_engine_is_dead_when_its_server_reports_another_version_or_dies(testbed: EngineTestbed,
                                                                                 foreign: ForeignServer) -> None:
    """Another version: as a server reports that was restarted."""
    for engine_id, harm, message in (("x4", lambda: change_version(foreign), "reports version 0"),
                                     ("x5", lambda: os.kill(foreign.process.pid, signal.SIGKILL), "no longer answers")):
        testbed.start_engine(engine_id, external_url=foreign.url)
        testbed.wait_ready(engine_id)
        assert testbed.workers()[foreign.url]
        harm()
        assert message in testbed.wait_state(engine_id, EngineState.DEAD).reason
        testbed.await_end(engine_id)
        assert foreign.url not in testbed.workers()
        assert kinds(testbed, engine_id)[-1] == "engine.dead"
