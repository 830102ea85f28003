"""Stacks of processes: what is read of them, what is left out, and the file of one that hangs. py-spy and the processes
are real ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.heartbeat_folder import HeartbeatFile
from elastic_rl.etcd.process_state import machine_id, start_ticks
from elastic_rl.etcd.records import Heartbeat
from elastic_rl.host import processes, stacks
from elastic_rl.host.here import heartbeats_here
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.host.processes import RUN_MARK
from elastic_rl.host.service_files import ServiceFiles
from elastic_rl.host.stacks import MAX_FILES, MAX_TEXT, Named, error_of, program_of, read_all, text_of
from elastic_rl.runtime.clock import boottime_s

SECRET = "token-of-somebody"
SLEEPER = """
import sys, time
def waits_for_ever(value):
    print("begun", flush=True)
    time.sleep(600)
waits_for_ever(sys.argv[1])
"""


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits in a function, of the job ``j``, with a secret in its command line and in a variable."""
    (tmp_path / "runs" / "j" / "cluster").mkdir(parents=True)
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    mark = str((tmp_path / "runs" / "j" / "cluster").resolve())
    with subprocess.Popen([sys.executable, str(tmp_path / "sleeper.py"), SECRET], stdout=subprocess.PIPE,
                          env={**os.environ, RUN_MARK: mark}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_stacks_name_functions_and_no_values_or_arguments(sleeper: subprocess.Popen[bytes]) -> None:
    [found] = read_all([Named(sleeper.pid, "trainer/0")])
    assert found.error == "" and "waits_for_ever (sleeper.py:5)" in found.text and "<module>" in found.text
    assert found.program.startswith("python") and SECRET not in found.model_dump_json()
    shown = stacks.shown(found, "host-a")
    assert shown.startswith(f"== trainer/0 (pid {sleeper.pid} on host-a, python") and SECRET not in shown


def test_process_of_another_language_is_listed_and_one_that_has_ended_is_not() -> None:
    with subprocess.Popen(["sleep", "600"]) as other, subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        ended.wait()
        [found] = read_all([Named(other.pid), Named(ended.pid)])
        other.kill()
    assert found.pid == other.pid and found.program == "sleep" and "no Python process" in found.error


def test_once_the_time_is_over_no_further_process_is_read(sleeper: subprocess.Popen[bytes]) -> None:
    [found] = read_all([Named(sleeper.pid)], limit_s=0.0)
    assert found.text == "" and "too long" in found.error


def test_processes_beyond_the_most_are_counted(
        sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MAX_PROCESSES", 1)
    first, more = read_all([Named(sleeper.pid), Named(sleeper.pid), Named(sleeper.pid)])
    assert first.text and (more.pid, more.error) == (0, "2 are not read")


def test_job_has_its_marked_processes_and_their_children(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    cfg = config.parse({"job": "other", "run_dir": str(tmp_path / "runs")})
    assert [process.pid for process in stacks.of_job(cfg, "j")] == [sleeper.pid]
    assert stacks.of_job(cfg, "other") == []
    with pytest.raises(ConfigError, match="no name of a job"):
        stacks.of_job(cfg, "../j")


def test_parts_of_other_jobs_are_not_read_though_the_agent_has_started_them(
        sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The agent is the parent of the services of all jobs; ``sleeper`` is a process of j."""
    cfg = config.parse({"job": "other", "run_dir": str(tmp_path / "runs")})
    files = ServiceFiles(ClusterPaths.of(cfg).agents)
    program = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); print(1, flush=True); time.sleep(600)"
    pid = files.start("agent", [sys.executable, "-c", program], log=tmp_path / "log")
    try:
        wait_until(lambda: psutil.Process(pid).children(), what="its child")
        assert stacks.of_job(cfg, "other") == [Named(pid, "agent")]
        assert {process.pid for process in stacks.of_job(cfg, "j")} == {pid, sleeper.pid}
    finally:
        processes.stop_all([pid], grace_s=0.0)


def test_process_of_a_heartbeat_is_read_only_if_it_is_still_the_same(
        sleeper: subprocess.Popen[bytes], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    cfg = config.parse({"job": "beats", "run_dir": str(tmp_path / "runs")})
    folder = heartbeats_here(cfg)
    folder.path.parent.mkdir(parents=True, mode=0o700)
    request.addfinalizer(lambda: shutil.rmtree(folder.path.parent))  # in /dev/shm

    def leave(started: int) -> list[Named]:
        beat = Heartbeat(role="trainer", id="0", incarnation="0123456789abcdef")
        assert folder.write(HeartbeatFile(beat=beat, pid=sleeper.pid, started=started, machine=machine_id(),
                                          lease_s=9.0, written_s=boottime_s()))
        return stacks.of_job(cfg, "beats")

    assert leave(start_ticks(sleeper.pid)) == [Named(sleeper.pid, "trainer/0")]
    assert leave(start_ticks(sleeper.pid) - 1) == [], "another process has its pid now"


def test_stacks_that_take_too_long_or_cannot_be_begun_are_given_up(
        sleeper: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(stacks, "_HANG_LIMIT_S", 0.05)
    monkeypatch.setattr(stacks, "read_all", lambda *_, **__: over.wait())
    assert stacks.write_of_hang(tmp_path, "trainer", [sleeper.pid], "hangs") is None
    over.set()

    def no_thread(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(stacks, "_HANG_LIMIT_S", 60.0)
    monkeypatch.setattr(stacks, "read_all", no_thread)
    assert stacks.write_of_hang(tmp_path, "trainer", [sleeper.pid], "hangs") is None


def test_file_of_a_hang_has_the_cause_and_the_stacks_and_old_ones_are_deleted(
        sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    folder = JobPaths(tmp_path / "runs" / "j").hangs
    folder.mkdir()
    for n in range(MAX_FILES + 3):
        (folder / f"20200101-000000.{n:03d}-old.txt").write_text("")
    path = stacks.write_of_hang(folder, "engine-a/b", [sleeper.pid], "engine a/b hangs")
    assert path is not None and path.parent == folder and path.name.endswith("-engine-a_b.txt")
    text = path.read_text()
    assert text.startswith("engine a/b hangs\n") and "waits_for_ever" in text and SECRET not in text
    assert path.stat().st_mode & 0o077 == 0
    kept = sorted(folder.iterdir())
    assert len(kept) == MAX_FILES and kept[-1] == path and kept[0].name == "20200101-000000.004-old.txt"


def test_hang_whose_file_cannot_be_written_raises_nothing(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert stacks.write_of_hang(tmp_path / "file", "trainer", [sleeper.pid], "hangs") is None


@pytest.mark.parametrize(("command", "program"), [
    (["/venv/bin/python3", "-m", "elastic_rl.coordinator.service", "--token=x"],
     "python3 -m elastic_rl.coordinator.service"),
    (["python", "-u", "-m", "pkg.mod", "--key", "x"], "python -m pkg.mod"),
    (["python", "-c", "-m", "secret"], "python"),
    (["python", "script.py", "-m", "secret"], "python"),
    (["python", "-m", "pkg=secret/x"], "python"),
    (["/usr/bin/etcd", "--initial-cluster-token=x"], "etcd"),
    (["ray::ComponentActor.wait secret"], "ray::ComponentActor.wait"),
    ([""], "unknown"), ([], "unknown")])
def test_program_is_named_without_its_arguments(command: list[str], program: str) -> None:
    assert program_of(command) == program


@settings(max_examples=seeds(40))
@given(st.lists(st.text(min_size=1), max_size=6))
def test_name_of_a_program_has_at_most_its_first_word_and_a_module(command: list[str]) -> None:
    name, _, module = program_of(command).partition(" -m ")
    assert len(program_of(command)) <= 100
    assert not command or name == "unknown" or command[0].find(name) >= 0
    assert not module or any(word.startswith(module) for word in command[1:])


frames = st.fixed_dictionaries({"name": st.text(max_size=60), "filename": st.text(max_size=60),
                                "short_filename": st.none() | st.text(max_size=60), "line": st.integers(0, 10 ** 6)})
threads = st.fixed_dictionaries({
    "os_thread_id": st.none() | st.integers(1, 10 ** 6), "thread_id": st.integers(1, 2 ** 47),
    "thread_name": st.none() | st.text(max_size=30), "active": st.booleans(), "owns_gil": st.booleans(),
    "frames": st.lists(frames, max_size=3)})


@settings(max_examples=seeds(40))
@given(st.lists(threads, max_size=4), st.integers(1, 300))
def test_text_has_the_frames_in_their_order_and_is_bounded(found: list[dict[str, Any]], times: int) -> None:
    text = text_of(found)
    assert text.count("thread ") >= len(found)
    at = 0
    for thread in found:
        for frame in thread["frames"]:
            at = text.index(f"    {frame['name']} (", at)
    assert len(text_of([{**thread, "frames": thread["frames"] * times} for thread in found] * times)) <= MAX_TEXT


@pytest.mark.parametrize(("said", "error"), [
    ("Permission Denied: Try running again with elevated permissions by going 'sudo env'", stacks.NOT_PERMITTED),
    ("Error: Failed to open process\n\nCaused by:\n    Operation not permitted (os error 1)", stacks.NOT_PERMITTED),
    ("Error: Failed to find python version from target process\n\nStack backtrace:\n 0: x",
     "py-spy: Error: Failed to find python version from target process"),
    ("", "py-spy: exit code 1")])
def test_error_says_whether_it_was_not_permitted(said: str, error: str) -> None:
    assert error_of(said, 1) == error
