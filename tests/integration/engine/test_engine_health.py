"""A real engine whose scheduler is stopped is found by its probes and ended; one that is only busy or slow is not.
An engine that alone cannot fetch is ended; one that cannot because nobody can, waits. So does one without a router."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import psutil
import pytest
from support.engine_testbed import QUICK, EngineTestbed, await_gone, scheduler_of, suspended
from support.tiers import full
from support.waiting import wait_until

from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.engine.server.health import Health
from elastic_rl.errors import NodeUnavailable
from elastic_rl.etcd.records import EngineState


def probed_again(testbed: EngineTestbed, engine_id: str) -> None:
    """Waits for a sign of life that is younger than this call."""
    monitor = testbed.runners[engine_id]._monitor
    seen = monitor.health
    wait_until(lambda: monitor.health is not seen and monitor.health.state is Health.HEALTHY,
               what="a probe that is answered")


@full(proved_in="tests/unit/engine/test_server_start.py tests/integration/engine/test_external_engine.py",
      why="a server of the engine's own, which ends")
def test_engine_with_a_stopped_scheduler_is_unrouted_and_dead_with_the_reason(testbed: EngineTestbed) -> None:
    testbed.stop_engines()
    testbed.start_engine("frozen", **QUICK)
    engine = testbed.wait_ready("frozen")
    probed_again(testbed, "frozen")
    pids = testbed.server_pids("frozen")
    with suspended(scheduler_of(engine.pid).pid):
        dead = testbed.wait_state("frozen", EngineState.DEAD)
        assert "no sign of life" in dead.reason
        testbed.await_end("frozen")
        assert engine.url not in testbed.workers()
        await_gone(pids)
    [death] = [e for e in testbed.events("frozen") if e.kind == "engine.dead"]
    assert death.data["detect_s"] >= QUICK["frozen_after_s"]


@contextlib.contextmanager
def starved(pids: list[int]) -> Iterator[None]:
    """The processes share one core with fifteen busy ones that go first."""
    core = {min(os.sched_getaffinity(0))}
    spin = f"import os\nos.sched_setaffinity(0, {core})\nwhile True: pass"
    # Sessions of their own: the kernel shares a core between sessions first.
    hogs = [subprocess.Popen([sys.executable, "-c", spin], start_new_session=True) for _ in range(15)]
    processes = [psutil.Process(pid) for pid in pids]
    threads = [thread.id for process in processes for thread in process.threads()]
    cores = os.sched_getaffinity(processes[0].pid)
    try:
        with contextlib.suppress(OSError):  # a kernel without it has no groups of sessions
            Path(f"/proc/{pids[0]}/autogroup").write_text("19")
        for thread in threads:
            os.setpriority(os.PRIO_PROCESS, thread, 19)
            os.sched_setaffinity(thread, core)
        yield
    finally:
        for hog in hogs:
            hog.kill()
        for hog in hogs:
            hog.wait()
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)


@full(proved_in="tests/unit/engine/test_health.py", why="a real server under load")
def test_busy_or_starved_engine_is_not_taken_for_frozen(testbed: EngineTestbed) -> None:
    """With limits that are shorter than the work: a full batch with a long queue, then no CPU."""
    testbed.stop_engines()
    testbed.start_engine("busy", max_running_requests=8, **QUICK)
    testbed.wait_ready("busy")
    monitor = testbed.runners["busy"]._monitor
    seen: set[Health] = set()
    with testbed.asked("busy", n=64) as answers:
        while not answers.done():
            seen.add(monitor.health.state)
            futures.wait([answers], timeout=0.05)
    assert len(answers.result()) == 64 and Health.FROZEN not in seen
    testbed.assert_logprobs(answers.result())

    with testbed.asked("busy", n=64), starved(testbed.server_pids("busy")):
        # Silent for longer than a stopped engine lives.
        wait_until(lambda: monitor.health.starved_s > QUICK["frozen_after_s"], what="a starved engine")
        assert testbed.record("busy").state is EngineState.READY
    probed_again(testbed, "busy")
    testbed.assert_serves()


class Nodes:
    """Stands between engines and their checkpoint node: those in ``cut_off`` cannot reach it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cut_off: set[str] = set()
        pull = Puller.pull

        def pull_if_connected(puller: Puller, *args: object, **options: object) -> object:
            if puller._name.removeprefix("engine-") in self.cut_off:
                raise NodeUnavailable("the node of this host cannot be reached")
            return pull(puller, *args, **options)

        monkeypatch.setattr(Puller, "pull", pull_if_connected)


@full(proved_in="tests/unit/engine/test_fetch_failures.py", why="the rule with real servers")
def test_engine_that_alone_cannot_fetch_is_ended_and_one_of_many_waits(
        testbed: EngineTestbed, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(monkeypatch)
    testbed.stop_engines()
    names = ["rollout-cut", "rollout-whole"]
    for name in names:
        testbed.start_engine(name, fetch_timeout_s=3.0)
    engines = {name: testbed.wait_ready(name) for name in names}

    nodes.cut_off = set(names)
    before, after = testbed.published, testbed.publish(seed=31)
    failures = [testbed.runners[name]._fetch_failures for name in names]
    wait_until(lambda: all(f.count > 6 and f.overdue(time.monotonic()) for f in failures),
               what="engines that are overdue")
    for name in names:
        found = testbed.record(name)
        assert (found.state, found.version) == (EngineState.READY, before)
    assert testbed.ask()[0].oldest_version == before

    nodes.cut_off = {"rollout-cut"}
    testbed.wait_ready("rollout-whole", after)
    dead = testbed.wait_state("rollout-cut", EngineState.DEAD)
    testbed.await_end("rollout-cut")
    assert "1 of 1 other engines can" in dead.reason and NodeUnavailable.__name__ in dead.reason
    testbed.await_unrouted(engines["rollout-cut"].url)
    assert testbed.workers()[engines["rollout-whole"].url]
    kinds = [(e.kind, str(e.severity)) for e in testbed.events("rollout-cut")]
    assert kinds[-3:] == [("engine.cannot_fetch", "warning"), ("engine.cannot_fetch", "error"),
                          ("engine.dead", "error")]
    testbed.assert_serves()


@full(proved_in="tests/unit/engine/test_engine_lifecycle.py tests/integration/driver/test_router_supervisor.py",
      why="the wait with a real server")
def test_engine_follows_the_head_while_it_waits_for_its_router(testbed: EngineTestbed) -> None:
    testbed.stop_engines()
    os.kill(testbed.router.pid, signal.SIGKILL)
    wait_until(lambda: not testbed.router.alive(), what="the router's end")
    name = f"unrouted-{secrets.token_hex(2)}"
    testbed.start_engine(name)

    def waits(version: int) -> bool:
        found = testbed.runners[name]._lifecycle
        return found.version == version and testbed.runners[name]._member._member.phase == "waiting for the router"

    wait_until(lambda: waits(testbed.published), timeout_s=400, what="an engine that waits for the router")
    assert testbed.record(name).state is EngineState.SYNCING
    second = testbed.publish(seed=41)
    wait_until(lambda: waits(second), what="the next version")
    testbed.router.start()
    engine = testbed.wait_ready(name)
    assert testbed.workers() == {engine.url: True} and engine.version == second
    assert [e.kind for e in testbed.events(name)] == ["engine.ready"]
    testbed.assert_serves()
