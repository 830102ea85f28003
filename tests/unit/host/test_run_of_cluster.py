"""How a cluster starts, finds and ends the run of its job, with a small program in the run's place."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ConfigError, DeadlineExceeded, PreflightFailed
from elastic_rl.etcd.cluster_records import JobPhase
from elastic_rl.host import cluster_settings, file_lock, local_cluster
from elastic_rl.host.agent.restart_policy import RestartLimits
from elastic_rl.host.agent.supervisor import ServiceSupervisor
from elastic_rl.host.job_run import RunStatus, Submission
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
        self.cluster = Cluster(config.parse({"job": "j", "run_dir": str(folder)}))
        self.cluster.dir.mkdir(parents=True)
        ClusterInfo("j", ["127.0.0.1:1"], [], "", own_etcd=False).save(self.cluster.paths.info)
        self.run, self.paths = self.cluster.run, JobPaths.of(self.cluster.cfg)
        self.submission = Submission.of_this_process(self.cluster.cfg, faults=False, from_job="")

    def start(self, program: str = _SLEEP, *, name: str = "") -> int:
        """Starts a service, the run by default; returns its pid once it says something."""
        log = self.cluster.dir / f"{name or 'run'}.out"
        log.unlink(missing_ok=True)
        pid = self.cluster.services.start(name or self.run.name, [sys.executable, "-I", "-c", program], log=log)
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
        for path in (*self.cluster.services.folder.glob("*.json"), *self.cluster.agents.folder.glob("*.json")):
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
def test_run_whose_submitter_was_killed_before_it_was_started_is_started(
        world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run.submit(world.submission)
    assert [r.name for r in world.cluster.supervised()] == [world.run.name]
    started: list[str] = []
    monkeypatch.setattr(world.cluster, "_spawn", lambda name, *_, **__: started.append(name))
    assert world.cluster.revive(world.run.name) and started == [world.run.name]
    world.run.withdraw()
    assert world.cluster.supervised() == []
    assert not world.cluster.revive(world.run.name) and started == [world.run.name]


def test_run_that_cannot_be_started_is_not_submitted(world: World) -> None:
    world.run.save(before := RunStatus(phase=JobPhase.FINISHED, submitted_at=1.0, at=2.0))
    gone = Submission.of_this_process
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Submission, "of_this_process",
                        lambda *_, **__: gone(world.cluster.cfg, faults=False, from_job="").replace(python="/gone"))
        with pytest.raises(PreflightFailed, match="the Python that job j was submitted with is gone: /gone"):
            world.cluster.submit()
    assert not world.run.submitted and world.run.read().status == before


def test_submission_that_cannot_be_written_leaves_the_status_of_the_run_before(
        world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_rl.host import job_run
    world.run.save(before := RunStatus(phase=JobPhase.FINISHED, submitted_at=1.0, at=2.0))
    write = job_run.replace_file

    def full(path: Path, content: bytes, **options: Any) -> None:
        if path == world.paths.submission:
            raise OSError(28, "No space left on device", str(path))
        write(path, content, **options)

    monkeypatch.setattr(job_run, "replace_file", full)
    with pytest.raises(PreflightFailed, match="No space left"):
        world.cluster.submit()
    assert world.run.read().status == before and not world.run.submitted


def test_run_uses_the_interpreter_and_folder_of_its_submitter(world: World, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho \"$PWD $@\" >> {tmp_path}/started\n")
    program.chmod(0o755)
    (folder := tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.chdir(folder)
    world.cluster.submit()
    started = tmp_path / "started"
    wait_until(started.exists, what="the run")
    assert started.read_text().startswith(f"{folder} -m elastic_rl.run_service --job=j --run_dir={tmp_path}")


def test_run_is_not_submitted_where_the_host_agent_does_not_see_it(
        world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start(name="etcd-0")
    monkeypatch.setattr(local_cluster, "_EXIT_GRACE_S", 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(file_lock, "_holds", lambda pid, target: False)  # as in another container
        with pytest.raises(PreflightFailed, match="run on another machine"):
            world.cluster.submit()
    assert not world.run.submitted


def test_cluster_with_a_run_between_two_processes_gets_no_owner(world: World) -> None:
    world.run.submit(world.submission)
    with world.agent():
        with pytest.raises(ConfigError, match="already being trained"), world.cluster.owned():
            pass
        assert world.run.submitted
    wait_until(lambda: not world.cluster.agents.running(), what="the end of the agent")
    with world.cluster.owned():
        assert not world.run.submitted, "nobody would start it again"


# -- the agent's passes ------------------------------------------------------------------------------------------------
def test_files_of_a_run_that_cannot_be_read_delay_no_other_service(
        world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start(name="etcd-0")
    monkeypatch.setattr(world.run, "read", lambda: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    assert {r.name for r in world.cluster.supervised()} == {"etcd-0", world.run.name}


def test_supervisor_forgets_a_run_that_has_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.host.etcd_server.healthy", lambda endpoint, timeout_s=0.5: True)
    supervisor = ServiceSupervisor(limits=RestartLimits(backoff_initial_s=0.0), clock=lambda: 5.0)
    monkeypatch.setattr(supervisor, "_report", lambda *_: None)
    monkeypatch.setattr(world.cluster, "_start_agent", lambda name: None)
    monkeypatch.setattr(world.cluster, "_spawn", lambda *_, **__: 0)
    world.run.submit(world.submission)
    info = ClusterInfo.load(world.cluster.paths.info)
    supervisor.supervise(world.cluster, info, AGENTS[1])
    assert world.run.name not in {**supervisor._restarts, **supervisor._unreported}, "it was queued, and has begun"
    status = world.run.read().status
    assert status is not None
    world.run.save(status.now(JobPhase.RUNNING))
    supervisor.supervise(world.cluster, info, AGENTS[1])  # its end is seen, and it is started again
    assert supervisor._restarts[world.run.name] == supervisor._unreported[world.run.name] == 1
    world.run.withdraw()
    assert world.run.name not in supervisor.supervise(world.cluster, info, AGENTS[1])
    for known in (supervisor._states, supervisor._faults, supervisor._restarts, supervisor._unreported):
        assert world.run.name not in known


# -- stopping ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", [Cluster.stop_run, Cluster.down], ids=["stop", "down"])
def test_run_that_does_not_end_is_killed_without_what_it_has_started(
        world: World, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    """The host agent may be what it has started: a run starts that again."""
    monkeypatch.setattr(local_cluster, "_STOP_RUN_S", 0.2)
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
    monkeypatch.setattr(local_cluster, "_STOP_RUN_S", 0.5)
    first, later = world.start(), list[int]()

    def wait(check: Any, **options: Any) -> Any:
        if not later:
            wait_until(lambda: not runs(psutil.Process(first)), what="the end of the first run")
            wait_until(lambda: not world.cluster.services.runs(world.run.name), what="its lock")
            later.append(world.start())
        return local_cluster_wait(check, **options)

    local_cluster_wait = local_cluster.wait_until
    monkeypatch.setattr(local_cluster, "wait_until", wait)
    monkeypatch.setattr(local_cluster.leftovers, "sweep", lambda _: pytest.fail("it would end the later run's driver"))
    assert world.cluster.stop_run()
    assert runs(psutil.Process(later[0]))


def test_run_that_its_file_does_not_name_is_not_killed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pid may be that of the process which is just starting it."""
    monkeypatch.setattr(local_cluster, "_STOP_RUN_S", 0.2)
    pid = world.start()
    path = next(world.cluster.services.folder.glob("*.json"))
    path.write_text("{")
    with pytest.raises(PreflightFailed, match="does not end where it runs"):
        world.cluster.stop_run()
    assert runs(psutil.Process(pid))


def test_stop_kills_nothing_beside_another_command(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "_STOP_RUN_S", 0.2)
    monkeypatch.setattr(local_cluster, "_DOWN_LOCK_TIMEOUT_S", 0.2)
    pid = world.start(_KEEPS_ON)
    started = psutil.Process(int((world.cluster.dir / "run.out").read_text().split()[0]))
    try:
        with world.cluster._locked(0.0), pytest.raises(DeadlineExceeded, match="another command"):
            world.cluster.stop_run()
        assert runs(psutil.Process(pid))
    finally:
        started.kill()


def test_down_on_a_full_disk_has_withdrawn_the_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run.submit(world.submission)

    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "touch", full)
    with contextlib.suppress(OSError):
        world.cluster.down()
    assert not world.run.submitted


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


def test_unfinished_submission_is_deleted_as_a_secret(world: World) -> None:
    world.run.submit(world.submission)
    partial = world.paths.submission.with_name(world.paths.submission.name + ".partial")
    partial.write_text("secret")
    assert partial in world.paths.secret_files()
    assert world.run.withdraw() and not partial.exists()
    partial.write_text("secret")
    assert not world.run.withdraw() and not partial.exists(), "an unfinished one is no submission"
