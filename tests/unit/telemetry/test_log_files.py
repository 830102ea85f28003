"""Log rotation, with real writers and a real file system."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds
from support.shared_fixtures import small_disk
from support.waiting import wait_until

from elastic_rl.host import processes
from elastic_rl.telemetry import log_files, logs
from elastic_rl.telemetry.log_files import LogRotation, LogTail, enforce_limits, open_log


@dataclass(frozen=True)
class Limits:
    log_max_bytes: int = 10_000
    log_backups: int = 2
    log_files: int = 50


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "logs"
    made.mkdir()
    return made


@pytest.fixture
def flood(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child that writes to its log without end, as fast as it can."""
    process = processes.spawn(["yes", "some line of a log"], log=folder / "flood.log")
    yield process
    process.kill()
    process.wait()


def sizes(folder: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in folder.iterdir()}


def test_child_appends_from_the_start_of_its_log_after_a_rotation(folder: Path, tmp_path: Path) -> None:
    go, done = tmp_path / "go", tmp_path / "done"
    program = f"seq 10000; touch {done}; while [ ! -e {go} ]; do sleep 0.01; done; echo end"
    child = processes.spawn(["sh", "-c", program], log=folder / "child.log")
    wait_until(done.exists, what="the child's lines")
    written = (folder / "child.log").read_bytes()
    enforce_limits(folder, Limits())
    assert (folder / "child.log").stat().st_size == 0
    first, kept = (folder / "child.log.1").read_bytes().split(b"\n", 1)
    assert written.endswith(kept) and len(first + b"\n" + kept) == 20_000, "the end is kept, up to twice the limit"
    assert first == (b"[elastic-rl: %015d bytes before this were dropped when this log was rotated, after the part of "
                     b"%020d ns]" % (len(written) - len(kept), 0))
    go.touch()
    child.wait(20)
    assert (folder / "child.log").read_bytes() == b"end\n"


def test_log_of_a_child_that_writes_without_end_stays_bounded(folder: Path, flood: subprocess.Popen[bytes]) -> None:
    rotation = LogRotation(folder, Limits(), check_every_s=0.02)
    try:
        wait_until((folder / "flood.log.2").exists, what="a second rotation")
        first = (folder / "flood.log.2").stat().st_ino
        wait_until(lambda: (folder / "flood.log.2").stat().st_ino != first, what="a third one")
        assert flood.poll() is None
    finally:
        flood.kill()
        flood.wait()
        rotation.close()
    enforce_limits(folder, Limits())
    assert set(sizes(folder)) == {"flood.log", "flood.log.1", "flood.log.2"}
    assert sizes(folder)["flood.log"] <= 10_000 and max(sizes(folder).values()) <= 20_200


def test_oldest_unused_files_of_ended_processes_are_deleted(folder: Path) -> None:
    for n in range(20):
        (folder / f"engine-{n:02}.log").write_text("x")
        os.utime(folder / f"engine-{n:02}.log", (n, n))
    (folder / "notes.txt").write_text("not a log")
    (folder / "engine-19.log.3").write_text("more parts than log_backups")
    quiet = processes.spawn(["sleep", "60"], log=folder / "engine-00.log")
    os.utime(folder / "engine-00.log", (0, 0))
    try:
        enforce_limits(folder, Limits(log_files=5))
        left = {"engine-00.log", "engine-16.log", "engine-17.log", "engine-18.log", "engine-19.log", "notes.txt"}
        assert set(sizes(folder)) == left
    finally:
        quiet.kill()
        quiet.wait()
    enforce_limits(folder, Limits(log_files=4))
    assert set(sizes(folder)) == left - {"engine-00.log"}


def test_rotation_without_room_for_a_copy_frees_the_log(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "4M") as folder:
        (folder / "etcd.log").write_bytes(b"x" * (3 << 20))
        enforce_limits(folder, Limits(log_max_bytes=2 << 20))
        assert sizes(folder) == {"etcd.log": 0}


def test_rotation_leaves_the_folder_to_another_process_until_that_is_killed(folder: Path) -> None:
    (folder / "a.log").write_bytes(b"x" * 10_001)
    program = ("import fcntl, os, sys, time; f = os.open(sys.argv[1], os.O_RDONLY); fcntl.flock(f, fcntl.LOCK_EX); "
               "print('locked', flush=True); time.sleep(60)")
    other = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"locked\n"
    enforce_limits(folder, Limits())
    assert sizes(folder) == {"a.log": 10_001}
    other.kill()
    other.wait()
    enforce_limits(folder, Limits())
    assert sizes(folder) == {"a.log": 0, "a.log.1": 10_001}


def test_log_deleted_while_it_is_opened_is_opened_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock

    def delete_first(file: object, operation: int) -> None:
        monkeypatch.setattr(log_files.fcntl, "flock", lock)
        (folder / "a.log").unlink()
        lock(file, operation)  # type: ignore[arg-type]

    monkeypatch.setattr(log_files.fcntl, "flock", delete_first)
    with open_log(folder / "a.log") as file:
        file.write(b"kept")
    assert (folder / "a.log").read_bytes() == b"kept"


def test_missing_folder_is_no_error(tmp_path: Path) -> None:
    enforce_limits(tmp_path / "none", Limits())
    assert log_files.tail(tmp_path / "none.log") == ""


def test_setup_writes_json_lines_to_a_file(tmp_path: Path) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logs.setup("train", "info", file=tmp_path / "logs" / "train.log")
        began = time.time()
        logging.getLogger("x").info("one\ntwo")
        (line,) = (tmp_path / "logs" / "train.log").read_text().splitlines()
        assert json.loads(line) | {"at": ""} == {"at": "", "level": "info", "process": "train", "pid": os.getpid(),
                                                 "logger": "x", "message": "one\ntwo"}
        assert json.loads(line)["at"] >= time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(began))
    finally:
        root.handlers[:], _ = handlers, root.setLevel(level)
        logging.captureWarnings(False)


def test_redirected_output_of_process_and_children_is_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "actor.log"
    program = (
        "import subprocess, sys\nfrom pathlib import Path\nfrom elastic_rl.telemetry.log_files import redirect_output\n"
        f"print('before')\nredirect_output(Path({str(path)!r}))\nprint('printed', flush=True)\n"
        "sys.stderr.write('an error\\n')\nsubprocess.run(['sh', '-c', 'echo child; echo its error >&2'], stdout=2)\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "before\n"
    assert path.read_text().splitlines() == ["printed", "an error", "child", "its error"]


# -- reading a log from its end ----------------------------------------------------------------------------------------
def read(tail: LogTail) -> bytes:
    """All that is there for now."""
    return b"".join(iter(tail.read, b""))


@given(parts=st.lists(st.lists(st.sampled_from([b"", b"a", b"long line " * 9]), max_size=9), min_size=1, max_size=3),
       end=st.sampled_from([b"", b"unfinished"]), lines=st.integers(0, 30), block=st.integers(1, 50))
@settings(max_examples=seeds(60), deadline=None)
def test_tail_begins_with_the_last_lines_also_of_rotated_parts(parts: list[list[bytes]], end: bytes, lines: int,
                                                               block: int) -> None:
    contents = [b"".join(line + b"\n" for line in part) for part in parts]
    contents[-1] += end
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_files, "_COPY_BYTES", block)
        for age, content in enumerate(reversed(contents)):
            path = Path(name, f"x.log.{age}" if age else "x.log")
            path.write_bytes(content)
            os.utime(path, (100 - age, 100 - age))  # no two are written at one time
        tail = LogTail(Path(name, "x.log"), lines)
        expected = b"".join(contents).splitlines(keepends=True)
        assert read(tail) == b"".join(expected[-lines:] if lines else [])


def test_tail_reads_on_through_rotation_replacement_and_deletion(folder: Path) -> None:
    path = folder / "x.log"
    tail = LogTail(path, 10)
    assert read(tail) == b"", "it is not there yet"
    path.write_bytes(b"first\n")
    assert read(tail) == b"first\n"
    with path.open("ab") as writer:
        writer.write(b"long " * 4000)
        writer.flush()
        assert read(tail) == b"long " * 4000
        enforce_limits(folder, Limits())
        writer.write(b"after the rotation\n")
    assert read(tail) == b"after the rotation\n"
    path.rename(folder / "moved")
    path.write_bytes(b"to the new file\n")
    assert read(tail) == log_files._LOST + b"to the new file\n"
    path.unlink()
    assert read(tail) == b""
    path.write_bytes(b"it is back\n")
    assert read(tail) == log_files._LOST + b"it is back\n"


def test_end_of_a_large_log_is_read_without_the_rest(folder: Path) -> None:
    with (folder / "x.log").open("wb") as writer:
        writer.truncate(1 << 40)  # a hole, that nobody can read in a lifetime
        writer.seek(0, os.SEEK_END)
        writer.write(b"\none\ntwo\n")
    tail = LogTail(folder / "x.log", 2)
    assert read(tail) == b"one\ntwo\n"
