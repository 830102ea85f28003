"""Further ways in which engines fail: none serves half a version, and a dead one leaves no file behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from support.engine_testbed import EngineTestbed, await_gone, sglang_files
from support.tiers import full
from support.waiting import wait_until

from elastic_rl.coordinator.membership.weight_outliers import outliers
from elastic_rl.etcd.records import Engine, EngineState
from elastic_rl.host.leftovers import remove_files, sweep, tagged_files
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.processes import spawn
from elastic_rl.runtime import failpoints


@full(proved_in="tests/unit/engine/test_engine_lifecycle.py tests/integration/engine/test_engine.py",
      why="an engine for each point of an update that it is killed at")
def test_scheduler_killed_in_an_update_never_serves_half_of_it(testbed: EngineTestbed,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine replaces the one that died before it, and brings the version that it died of."""
    testbed.stop_engines()
    for point in failpoints.ENGINE:
        # The first load of a process passes `apply.torn` once for each tensor, and `apply.applied` once.
        nth = {"apply.staged": 1, "apply.torn": len(list(testbed.model.parameters())), "apply.applied": 2}[point]
        monkeypatch.setenv(failpoints.ENV, f"{point}:{nth}")
        testbed.start_engine(point)
        engine = testbed.wait_ready(point)
        monkeypatch.delenv(failpoints.ENV)
        testbed.assert_serves()
        pids, first = testbed.server_pids(point), testbed.published
        second = testbed.publish(seed=200 + nth)
        dead = testbed.wait_state(point, EngineState.DEAD, EngineState.QUARANTINED)
        assert dead.version == first and dead.applying == (0 if point == "apply.staged" else second)
        testbed.await_end(point)
        await_gone(pids)
        assert engine.url not in testbed.workers()
    testbed.wait_ready(testbed.serving_engine())
    testbed.assert_serves()


@full(proved_in="tests/unit/engine/test_engine_lifecycle.py", why="the same end with a server")
def test_engine_ends_when_the_leader_quarantines_it(testbed: EngineTestbed) -> None:
    """That the leader does so is a test of the leader's: test_weight_outliers."""
    engine = testbed.wait_ready(testbed.serving_engine())
    testbed.etcd.update(testbed.keys.engine(engine.id), lambda raw: Engine.decode(raw or b"").replace(
        state=EngineState.QUARANTINED, reason="its weights differ").encode())
    assert testbed.wait_state(engine.id, EngineState.DEAD).reason == "its weights differ"
    testbed.await_end(engine.id)
    assert engine.url not in testbed.workers()


@full(proved_in="tests/unit/engine/test_staging.py tests/integration/engine/test_external_engine.py",
      why="a server of the engine's own that stages nothing")
def test_model_that_is_not_staged_is_loaded_in_the_pause(testbed: EngineTestbed) -> None:
    testbed.stop_engines()
    runner = testbed.start_engine("unstaged", staging_limit_bytes=0)
    testbed.wait_ready("unstaged")
    testbed.publish(seed=8)
    engine = testbed.wait_ready("unstaged")
    assert engine.checksum == "" and outliers([engine]) == []
    testbed.assert_serves()
    runner.stop()
    testbed.await_end("unstaged")


@full(proved_in="tests/unit/host/test_leftovers.py", why="the files of a real server")
def test_files_of_engine_killed_with_its_runner_are_swept_by_its_tag(testbed: EngineTestbed, tmp_path: Path) -> None:
    """A host's power is lost, or the driver's whole tree is killed: only the next start can clean up. The engine has
    two tensor-parallel ranks, which share a segment; Python's resource tracker may outlive them and remove that one."""
    testbed.stop_engines()
    context = testbed.context(extra_args=["--tp-size", "2"]).save(tmp_path / "context.json")
    runner = spawn([sys.executable, str(Path(__file__).with_name("engine_process.py")), str(context), "lost"],
                   log=tmp_path / "runner.log")
    try:
        engine = testbed.wait_ready("lost")
        testbed.publish(seed=9)
        testbed.wait_ready("lost")
        testbed.assert_serves()
        server = psutil.Process(engine.pid)
        pids = [p.pid for p in (server, *server.children(recursive=True))]
        files = sglang_files(pids)
    finally:
        os.kill(runner.pid, signal.SIGKILL)
        runner.wait(60)
    await_gone(pids)
    assert [f for f in files if f.exists()], "every file is gone already: this test shows nothing"

    paths = JobPaths.of(testbed.ctx.config)
    alive = testbed.serving_engine()
    assert testbed.wait_ready(alive).pid
    living = tagged_files(paths.file_tag(alive))
    sweep(JobPaths(tmp_path / "another job"))
    remove_files(paths.file_tag("los"))
    assert any(f.exists() for f in files), "the files of another owner were removed"
    remove_files(paths.file_tag("lost"))
    assert not [f for f in files if f.exists()] and not tagged_files(paths.file_tag("lost"))
    assert living and sorted(tagged_files(paths.file_tag(alive))) == sorted(living)
    wait_until(lambda: not testbed.workers().get(engine.url), what="the router to see the death")
    testbed.assert_serves()
