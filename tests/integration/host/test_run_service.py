"""The run of a job as a service of its cluster: it outlives whoever follows it, comes back when it is killed, and stays
away when it has ended or was stopped. Services and run are real; a stub takes the driver's place."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.commands import run as _run
from support.stub_run import put_stub_in_place
from support.tiers import full, parametrize
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import JobPhase, JobRecord
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import Epoch, JobStatus
from elastic_rl.host import kept_state, processes
from elastic_rl.host.agent.status import AgentStatus
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.processes import OWNER_ENV

_STEP = {"kind": "step", "at": 1.0, "step": 7, "reward_mean": 0.5, "samples": 8, "policy_version": 8,
         "groups": list(range(24, 28)), "seconds": {"total": 1.0}}


class Job:
    """A job on a cluster that is up."""

    def __init__(self, folder: Path) -> None:
        self.cfg = config.parse({"job": f"t-{secrets.token_hex(4)}", "run_dir": str(folder),
                                 "dcs": {"arena_bytes": 32 << 20}, "coordinator": {"replicas": 1},
                                 "train": {"prompts_per_step": 4}})
        self.cluster, self.paths = Cluster(self.cfg), JobPaths.of(self.cfg)
        self.options = [f"--job={self.cfg.job}", f"--run_dir={folder}"]
        self.keys = Keys(self.cfg.job)
        self.etcd = self.connect(self.cluster.up())

    def connect(self, info: ClusterInfo) -> EtcdClient:
        return EtcdClient(info.etcd_endpoints, call_timeout_s=2.0)

    def pid(self) -> int:
        """The process of the run; 0 while there is none."""
        return self.cluster.run.pid

    def drivers(self) -> list[str]:
        """Ids of the drivers that were started."""
        path = self.paths.private / "starts"
        return path.read_text().split() if path.exists() else []

    def await_driver(self, number: int) -> None:
        def begun() -> bool:
            found, started = self.etcd.get(self.keys.epoch()), self.drivers()
            return found is not None and len(started) == number and Epoch.decode(found.value).holder == started[-1]
        wait_until(begun, what=f"driver {number}")

    def submit(self) -> int:
        """Returns the pid of the run, once its driver has begun."""
        self.cluster.submit()
        self.await_driver(len(self.drivers()) or 1)
        self.paths.steps.write_text(json.dumps(_STEP) + "\n")
        return self.pid()

    def finish(self) -> None:
        self.etcd.put(self.keys.job_status(), JobStatus(phase="finished", step=7, steps=150).encode())

    def await_over(self) -> None:
        wait_until(lambda: self.cluster.run.read().over, what="the end of the run")

    def report(self) -> dict[str, Any]:
        return json.loads(self.paths.report.read_text())

    def kill(self, pid: int) -> None:
        psutil.Process(pid).kill()

    def kill_agent(self) -> None:
        def gone() -> bool:
            for record in self.cluster.agents.running():
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(record.pid).kill()
            return not self.cluster.agents.running()
        wait_until(gone, what="the end of the host agent")

    def await_agent(self) -> None:
        """Returns when the agent has done a whole pass since this call: what it does not do now, it would have done."""
        began = time.time()
        (self.cluster.paths.agent_status).unlink(missing_ok=True)
        wait_until(lambda: (status := AgentStatus.load(self.cluster.paths.agent_status)) and status.at > began + 1.0,
                   what="passes of the host agent")

    def follow(self, *args: str) -> subprocess.Popen[bytes]:
        """Starts a command in a session of its own, and returns once it shows the run."""
        log = self.cfg.run_dir / f"{secrets.token_hex(4)}.out"
        process = processes.spawn([sys.executable, "-m", "elastic_rl.cli.main", *args, *self.options], log=log)
        process.log = log  # type: ignore[attr-defined]
        wait_until(lambda: b"step 7/" in log.read_bytes(), what="the view", alive=lambda: process.poll() is None)
        return process


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    out = Job(tmp_path / "runs")  # its agent does not have the environment below
    put_stub_in_place(tmp_path, monkeypatch)
    try:
        yield out
    finally:
        out.etcd.close()
        out.cluster.down()


def test_refused_run_is_shown_with_its_hint_and_not_started_again(
        job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].partition(os.pathsep)[2])  # the checks are real
    code, said = _run(capsys, "train", "--model.path=/nowhere", *job.options)
    assert code == Exit.USAGE and "/nowhere" in said and "hint: " in said
    assert job.cluster.run.read().phase is JobPhase.FAILED
    [refused] = [e for e in events.recent(job.etcd, job.keys) if e.kind == "run.refused"]
    assert "/nowhere" in refused.message
    wait_until(lambda: any(a["kind"] == "run.refused" for a in AdminClient(
        job.cluster.connect()).items("alerts")), what="the alert")
    job.await_agent()
    assert not job.pid() and job.cluster.run.read().over
    assert _run(capsys, "attach", *job.options) == (code, said[said.index("error: "):])
    code, said = _run(capsys, "jobs", job.options[1])
    assert code == 0 and "failed" in said and "/nowhere" in said
    code, said = _run(capsys, "stop", *job.options)
    assert code == 0 and "does not run: failed" in said
    code, said = _run(capsys, "status", *job.options)
    assert code == 0 and "failed" in said and "/nowhere" in said


def test_run_outlives_its_followers_and_comes_back_when_it_is_killed(
        job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    first = job.submit()
    followers = [job.follow("attach") for _ in range(2)]
    followers[0].kill()
    assert job.pid() == first and not followers[1].poll()
    code, said = _run(capsys, "train", *job.options)
    assert code == Exit.USAGE and "already being trained" in said and "elastic-rl attach" in said

    submitted_at = job.cluster.run.read().submitted_at
    job.kill(first)
    job.await_driver(2)
    wait_until(lambda: any(e.kind == "run.restarted" for e in events.recent(job.etcd, job.keys)), what="the event")
    assert job.pid() not in (0, first) and followers[1].poll() is None
    reading = job.cluster.run.read()
    assert reading.phase is JobPhase.RUNNING and reading.submitted_at == submitted_at
    code, said = _run(capsys, "jobs", job.options[1], "-o", "json")
    [row] = json.loads(said)
    assert (row["job"], row["state"], row["step"], row["pid"]) == (job.cfg.job, "running", 7, job.pid())

    job.finish()
    assert followers[1].wait(120) == 0
    assert "finished" in followers[1].log.read_text()  # type: ignore[attr-defined]
    job.await_agent()
    assert not job.pid() and len(job.drivers()) == 2
    code, said = _run(capsys, "attach", job.cfg.job, job.options[1])
    assert code == 0 and f"{job.cfg.job}: finished" in said
    [row] = json.loads(_run(capsys, "jobs", job.options[1], "-o", "json")[1])
    assert (row["state"], row["pid"]) == ("finished", 0)


def test_stopped_run_has_its_report_stays_stopped_and_can_be_resumed(
        job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.submit()
    follower = job.follow("attach")
    code, said = _run(capsys, "stop", *job.options)
    assert code == 0 and "elastic-rl train" in said and job.cluster.run.read().phase is JobPhase.STOPPED
    assert follower.wait(120) == Exit.INTERRUPTED
    assert "the run was stopped" in follower.log.read_text()  # type: ignore[attr-defined]
    assert job.report()["steps"] == 1
    job.await_agent()
    assert not job.pid() and len(job.drivers()) == 1
    code, said = _run(capsys, "stop", *job.options)
    assert code == 0 and "does not run: stopped" in said

    code, said = _run(capsys, "train", "--detach", *job.options)
    assert code == 0 and "elastic-rl attach" in said
    job.await_driver(2)


@full(proved_in="tests/unit/host/test_job_run.py tests/integration/host/test_run_service.py",
      why="real processes that are killed in the middle of a stop")
def test_stop_that_is_killed_halfway_leaves_no_run_that_comes_back(job: Job) -> None:
    pid = job.submit()
    os.kill(pid, signal.SIGSTOP)
    job.cluster.run.withdraw(job.etcd)  # and here the stop is killed, and then the run
    assert job.cluster.run.read().stopping
    job.kill(pid)
    job.await_over()
    assert job.cluster.run.read().phase is JobPhase.STOPPED and len(job.drivers()) == 1
    job.submit()
    job.cluster.run.withdraw(job.etcd)  # and here only the stop is killed
    job.await_over()
    assert job.cluster.run.read().phase is JobPhase.STOPPED


def test_run_of_a_host_without_its_lease_is_ended_and_goes_on_when_etcd_answers(job: Job) -> None:
    """The host may be cut off, and the run assigned elsewhere meanwhile."""
    pid, etcd = job.submit(), psutil.Process(job.cluster.services.get("etcd-0").pid)  # type: ignore[union-attr]
    etcd.suspend()
    try:
        wait_until(lambda: job.pid() != pid, what="the end of the run")
    finally:
        etcd.resume()
    job.await_driver(2)
    assert job.cluster.run.read().phase is JobPhase.RUNNING
    job.finish()
    job.await_over()
    assert job.cluster.run.read().phase is JobPhase.FINISHED and len(job.drivers()) == 2


@full(proved_in="tests/unit/host/test_job_run.py tests/integration/host/test_run_service.py",
      why="without coordinators")
def test_run_is_stopped_while_no_coordinator_answers(job: Job) -> None:
    job.submit()
    coordinator = psutil.Process(job.cluster.services.get("coordinator-0").pid)  # type: ignore[union-attr]
    coordinator.suspend()
    try:
        assert job.cluster.stop_run() and job.cluster.run.read().phase is JobPhase.STOPPED
    finally:
        coordinator.resume()
    job.submit()


@full(proved_in="tests/unit/host/test_job_run.py tests/integration/host/test_run_service.py",
      why="a signal in place of a kill")
def test_signal_to_the_run_is_no_stop(job: Job) -> None:
    pid = job.submit()
    os.kill(pid, signal.SIGTERM)
    job.await_driver(2)
    assert job.pid() not in (0, pid) and job.paths.report.exists()


@full(proved_in="tests/unit/host/test_job_run.py tests/integration/host/test_run_service.py",
      why="both killed at once")
def test_run_and_agent_that_were_killed_are_started_by_a_follower(job: Job) -> None:
    pid = job.submit()
    job.kill_agent()
    job.kill(pid)
    wait_until(lambda: not job.pid(), what="the end of the run")
    job.follow("attach")
    job.await_driver(2)


@full(proved_in="tests/unit/host/test_job_run.py tests/integration/host/test_run_service.py",
      why="a job that ends while its run's process is down")
def test_run_whose_job_ended_while_its_process_was_down_is_finished_and_not_repeated(job: Job) -> None:
    pid = job.submit()
    job.kill_agent()
    job.kill(pid)
    wait_until(lambda: not processes.marked(str(job.paths.private)), what="the end of the driver")
    job.finish()
    job.cluster.up()
    job.await_over()
    assert job.cluster.run.read().phase is JobPhase.FINISHED
    assert job.report()["status"] == "finished" and len(job.drivers()) == 1


@full(proved_in="tests/unit/host/test_job_run.py tests/integration/host/test_run_service.py",
      why="everything killed at once")
def test_run_goes_on_after_a_loss_of_power(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.submit()
    (chunk := kept_state.chunks(job.cfg) / "ab" / "cd").parent.mkdir(parents=True)
    chunk.touch()  # else nothing could be resumed
    job.kill_agent()
    for files in (job.cluster.services, job.cluster.singletons):
        for record in files.running():
            job.kill(record.pid)
    wait_until(lambda: not job.cluster.services.running() and not job.pid(), what="the end of everything")
    shown = " ".join(_run(capsys, "jobs", job.options[1], "-o", "wide")[1].split())
    assert re.search(r"`elastic-rl up --job=\S+ --run_dir=\S+` starts them again", shown)
    code, said = _run(capsys, "up", *job.options)
    assert code == 0 and "goes on" in said and "elastic-rl attach" in said
    job.etcd.close()
    job.etcd = job.connect(job.cluster.connect())  # at another port
    job.await_driver(2)


@full(proved_in="tests/unit/host/test_job_run.py tests/integration/host/test_run_service.py",
      why="down in place of stop")
def test_down_stops_the_run_with_its_report_and_up_does_not_start_it_again(
        job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.submit()
    assert job.cluster.run.name in job.cluster.down()
    assert job.report()["steps"] == 1 and job.cluster.run.read().phase is JobPhase.STOPPED
    assert not processes.marked(str(job.cluster.dir)) and not processes.marked(str(job.cluster.dir), OWNER_ENV)
    assert "goes on" not in _run(capsys, "up", *job.options)[1]
    job.await_agent()
    assert not job.pid() and len(job.drivers()) == 1


def test_run_writes_its_stop_itself_where_etcd_does_not_answer_the_command_that_takes_its_cluster_down(job: Job
                                                                                                       ) -> None:
    """Its actor then reads the stop, and commits; `down` waits for that."""
    job.submit()
    job.etcd.put(job.keys.job_status(), JobStatus(phase="rl", step=7, steps=150).encode())
    etcd = psutil.Process(job.cluster.services.get("etcd-0").pid)  # type: ignore[union-attr]
    etcd.suspend()
    down = threading.Thread(target=job.cluster.down, daemon=True)
    try:
        down.start()
        wait_until(job.cluster.paths.stopped.exists, what="the cluster to count as down")
    finally:
        etcd.resume()
    record = ClusterKeys(job.cfg.cluster_name).job(job.cfg.job)
    wait_until(lambda: JobRecord.decode(job.etcd.get(record).value).stopped, what="the stop on record")
    assert job.pid() and down.is_alive(), "it may commit"
    job.finish()  # as far as the stub knows
    down.join(120)
    assert not down.is_alive() and job.report()["steps"] == 1


@full(proved_in="tests/integration/host/test_host_agent.py tests/integration/host/test_run_service.py",
      why="the end of a killed owner's cluster, with a run on it")
def test_run_of_an_owner_that_is_killed_goes_down_with_its_cluster(job: Job) -> None:
    job.paths.steps.write_text(json.dumps({**_STEP, "at": time.time() + 3600}) + "\n")  # of the run that begins
    owner = job.follow("train", "--with-cluster")
    job.await_driver(1)
    owner.kill()
    wait_until(lambda: not processes.marked(str(job.cluster.dir), OWNER_ENV), what="the end of everything")
    assert not job.cluster.up_before and job.cluster.run.read().phase is JobPhase.STOPPED
    assert job.paths.report.exists() and not processes.marked(str(job.cluster.dir))


@parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT],
             proved_in="tests/integration/host/test_run_service.py", why="each further signal")
def test_signal_to_a_follower_without_a_terminal_detaches_it(job: Job, number: signal.Signals) -> None:
    pid = job.submit()
    follower = job.follow("attach")
    follower.send_signal(number)
    assert follower.wait(120) == Exit.INTERRUPTED
    assert "elastic-rl attach" in follower.log.read_text()  # type: ignore[attr-defined]
    job.await_agent()
    assert job.pid() == pid


@parametrize(("keys", "stops"), [(b"\x03s", True), (b"\x03d", False), (b"\x03\x03", False)],
             proved_in="tests/integration/host/test_run_service.py", why="each further answer")
def test_ctrl_c_on_a_terminal_asks_whether_to_detach_or_to_stop(job: Job, keys: bytes, stops: bool) -> None:
    job.submit()
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-m", "elastic_rl.cli.main", "attach", *job.options])
    shown = b""

    def await_text(text: bytes) -> None:
        nonlocal shown
        while text not in shown:
            shown += os.read(terminal, 1 << 16)
        shown = b""

    await_text(b"step 7")
    os.write(terminal, keys[:1])
    await_text(b"[s]top")
    os.write(terminal, keys[1:])
    with contextlib.suppress(OSError):  # the terminal is closed
        while os.read(terminal, 1 << 16):
            pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == Exit.INTERRUPTED
    assert (job.cluster.run.read().phase is JobPhase.STOPPED) is stops
    os.close(terminal)
