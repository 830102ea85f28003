"""How a cluster starts, finds and ends the run of its job, with a small program in the run's place."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ConfigError, DeadlineExceeded, PreflightFailed
from elastic_rl.etcd.cluster_records import JobPhase, JobRecord, JobState
from elastic_rl.host import cluster_settings, file_lock, local_cluster
from elastic_rl.host.job_run import RunReading
from elastic_rl.host.local_cluster import AGENTS, Cluster
from elastic_rl.host.paths import JobPaths
from elastic_rl.runtime.process import runs

_SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)"
_KEEPS_ON = f"""
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
{_SLEEP}
"""
"""It does not end by SIGTERM, and has started a service of the cluster again, whose process is another's by nature."""


class World:
    """A cluster that is up by its files, of which nothing runs."""

    def __init__(self, folder: Path) -> None:
        self.cluster = Cluster(config.parse({"job": "j", "run_dir": str(folder),
                                             "trainer": {"stop_timeout_s": 0.2}}))
        self.cluster.dir.mkdir(parents=True)
        ClusterInfo("j", ["127.0.0.1:1"], [], "", own_etcd=False).save(self.cluster.paths.info)
        self.run, self.paths = self.cluster.run, JobPaths.of(self.cluster.cfg)

    def start(self, program: str = _SLEEP, *, name: str = "") -> int:
        """Starts a service, the run by default; returns its pid once it says something."""
        log = self.cluster.dir / f"{name or 'run'}.out"
        log.unlink(missing_ok=True)
        files = self.cluster.services if name else self.cluster.singletons
        pid = files.start(name or quote(self.run.name, safe=""), [sys.executable, "-I", "-c", program], log=log)
        wait_until(lambda: "up" in log.read_text(), what="the program")
        return pid

    @contextlib.contextmanager
    def agent(self) -> Iterator[None]:
        pid = self.cluster.agents.start(AGENTS[0], ["sleep", "600"], log=self.cluster.dir / "agent.out")
        try:
            yield
        finally:
            psutil.Process(pid).kill()

    def close(self) -> None:
        for files in (self.cluster.services, self.cluster.agents, self.cluster.singletons):
            for path in files.folder.glob("*.json"):
                for pid in file_lock.holders(path):
                    psutil.Process(pid).kill()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    out = World(tmp_path)
    try:
        yield out
    finally:
        out.close()


# -- submitting --------------------------------------------------------------------------------------------------------
def test_run_is_not_submitted_where_the_host_agent_does_not_see_it(
        world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start(name="etcd-0")
    monkeypatch.setattr(local_cluster, "_EXIT_GRACE_S", 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(file_lock, "_locks", lambda pid, fd, target: False)  # as in another container
        with pytest.raises(PreflightFailed, match="run on another machine"):
            world.cluster.submit()


def test_cluster_with_a_run_between_two_processes_gets_no_owner(
        world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = RunReading(None, JobRecord(submission=1), JobState(phase=JobPhase.RUNNING, submission=1, order=1))
    monkeypatch.setattr(world.run, "read", lambda: wanted)
    with world.agent(), pytest.raises(ConfigError, match="already being trained"), world.cluster.owned():
        pass
    wait_until(lambda: not world.cluster.agents.running(), what="the end of the agent")
    with world.cluster.owned():  # nobody would start it again
        assert world.cluster._owns


def test_cluster_whose_run_is_there_gets_no_owner(world: World) -> None:
    world.start()
    with pytest.raises(ConfigError, match="already being trained"), world.cluster.owned():
        pass


# -- stopping ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", [Cluster._end_run, Cluster.down], ids=["stop", "down"])
def test_run_that_does_not_end_is_killed_without_what_it_has_started(
        world: World, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    """The host agent may be what it has started: a run starts that again."""
    for limit in ("_EXIT_GRACE_S", "_STOP_RUN_S"):
        monkeypatch.setattr(local_cluster, limit, 0.2)
    pid = world.start(_KEEPS_ON)
    started = psutil.Process(int((world.cluster.dir / "run.out").read_text().split()[0]))
    try:
        command(world.cluster)
        wait_until(lambda: not psutil.pid_exists(pid) or not runs(psutil.Process(pid)), what="the end of the run")
        assert runs(started)
    finally:
        started.kill()


def test_stop_does_not_end_the_run_that_another_command_starts_meanwhile(
        world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "_EXIT_GRACE_S", 0.5)
    first, later = world.start(), list[int]()

    def wait(check: Any, **options: Any) -> Any:
        if not later:
            psutil.Process(first).kill()
            wait_until(lambda: not runs(psutil.Process(first)), what="the end of the first run")
            wait_until(lambda: not world.run.pid, what="its lock")
            later.append(world.start())
        return local_cluster_wait(check, **options)

    local_cluster_wait = local_cluster.wait_until
    monkeypatch.setattr(local_cluster, "wait_until", wait)
    monkeypatch.setattr(local_cluster.leftovers, "sweep", lambda _: pytest.fail("it would end the later run's driver"))
    assert world.cluster._end_run()
    assert runs(psutil.Process(later[0]))


def test_run_that_its_file_does_not_name_is_not_killed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pid may be that of the process which is just starting it."""
    monkeypatch.setattr(local_cluster, "_EXIT_GRACE_S", 0.2)
    pid = world.start()
    path = next(world.cluster.singletons.folder.glob("*.json"))
    path.write_text("{")
    with pytest.raises(PreflightFailed, match="does not end where it runs"):
        world.cluster._end_run()
    assert runs(psutil.Process(pid))


def test_stop_kills_nothing_beside_another_command(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "_EXIT_GRACE_S", 0.2)
    monkeypatch.setattr(local_cluster, "_DOWN_LOCK_TIMEOUT_S", 0.2)
    pid = world.start(_KEEPS_ON)
    started = psutil.Process(int((world.cluster.dir / "run.out").read_text().split()[0]))
    try:
        with world.cluster._locked(0.0), pytest.raises(DeadlineExceeded, match="another command"):
            world.cluster._end_run()
        assert runs(psutil.Process(pid))
    finally:
        started.kill()


def test_down_gives_a_run_the_time_of_its_settings_to_commit_although_etcd_does_not_answer(
        world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run writes its stop itself once etcd answers."""
    monkeypatch.setattr(local_cluster, "_WITHDRAW_S", 0.1)
    said = list[str]()
    monkeypatch.setattr(world.cluster, "_say", said.append)
    assert world.cluster._withdraw_run() == 0.0, "nothing runs"
    world.start()
    assert world.cluster._withdraw_run() == 0.2
    cluster_settings.save(config.parse({"job": "j", "trainer": {"stop_timeout_s": 7.0}}), world.paths.settings)
    assert world.cluster._withdraw_run() == 7.0 and "if etcd answers within 7 s" in said[-1]
    world.cluster.paths.info.replace(world.cluster.paths.stopped)  # by a `down` that was interrupted
    assert world.cluster._withdraw_run() == 7.0


def test_down_on_a_full_disk_ends_the_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "_STOP_RUN_S", 0.2)
    pid = world.start()

    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "touch", full)
    world.cluster.down()
    assert not psutil.pid_exists(pid) or not runs(psutil.Process(pid))


# -- owners and settings -----------------------------------------------------------------------------------------------
def test_owner_whose_cluster_could_not_be_taken_down_leaves_it_to_the_host_agent(world: World) -> None:
    world.cluster.paths.info.unlink()
    with world.cluster.owned() as was_up:
        assert not was_up
        ClusterInfo("j", ["127.0.0.1:1"], [], "", own_etcd=False).save(world.cluster.paths.info)  # up, and no down
    assert world.cluster.abandoned


def test_settings_of_another_command_are_not_put_back(world: World) -> None:
    path, cfg = world.cluster.paths.settings, world.cluster.cfg
    cluster_settings.save(cfg.model_copy(update={"seed": 1}), path)
    before = cluster_settings.snapshot(path)
    cluster_settings.save(cfg, path)
    world.cluster.restore_settings(before)
    assert cluster_settings.snapshot(path) == before
    cluster_settings.save(cfg.model_copy(update={"seed": 2}), path)
    world.cluster.restore_settings(before)
    assert cluster_settings.stored(path)["seed"] == 2
