"""The files of a host's processes and the mark of its agent."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from elastic_rl.etcd import heartbeat_folder
from elastic_rl.etcd.heartbeat_folder import MAX_FILE_BYTES, HeartbeatFile, HeartbeatFolder
from elastic_rl.etcd.process_state import machine_id, start_ticks
from elastic_rl.etcd.records import Heartbeat
from elastic_rl.runtime.clock import boottime_s

INCARNATION, OTHER = "0123456789abcdef", "f" * 16


@pytest.fixture
def folder(tmp_path: Path) -> HeartbeatFolder:
    (tmp_path / "heartbeats").mkdir()
    return HeartbeatFolder(tmp_path / "heartbeats" / "j", "h0")


def file(incarnation: str = INCARNATION, *, machine: str = "", phase: str = "train") -> HeartbeatFile:
    beat = Heartbeat(role="trainer", id="rank-0", incarnation=incarnation, phase=phase, beats=1)
    return HeartbeatFile(beat=beat, pid=os.getpid(), started=start_ticks(os.getpid()), machine=machine or machine_id(),
                         lease_s=9.0, written_s=boottime_s())


def test_file_is_read_as_it_was_written_and_only_its_owner_can(folder: HeartbeatFolder) -> None:
    before = os.umask(0)
    try:
        assert folder.write(file()) and folder.write(changed := file(phase="publish"))
        folder.mark([], boottime_s() + 60.0)
    finally:
        os.umask(before)
    assert folder.contents().files == [changed] and folder.contents().unreadable == {}
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()} == {0o600}


def test_process_leaves_nothing_where_there_is_no_agent(tmp_path: Path) -> None:
    folder = HeartbeatFolder(tmp_path / "heartbeats" / "j", "h0")
    assert not folder.write(file()) and not folder.is_collected(INCARNATION)
    folder.remove(INCARNATION)
    assert list(tmp_path.iterdir()) == [] and folder.contents().files == []


def test_mark_counts_for_the_processes_it_names_until_it_is_over(folder: HeartbeatFolder,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write(file())
    assert not folder.is_collected(INCARNATION)
    folder.mark([INCARNATION], boottime_s() + 60.0)
    assert folder.is_collected(INCARNATION) and not folder.is_collected(OTHER)
    folder.mark([INCARNATION], boottime_s() - 1.0)
    assert not folder.is_collected(INCARNATION)
    monkeypatch.setattr(heartbeat_folder, "machine_id", lambda: "of the boot before")
    folder.mark([INCARNATION], boottime_s() + 60.0)
    monkeypatch.undo()
    assert not folder.is_collected(INCARNATION)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"until_s": 1e99}', b"\xff" * 100, b"x" * 100_000])
def test_mark_that_cannot_be_read_is_none(folder: HeartbeatFolder, content: bytes) -> None:
    folder.write(file())
    (folder.path / "collected").write_bytes(content)
    assert not folder.is_collected(INCARNATION)


def test_file_that_is_not_as_it_should_be_is_left_out_and_named(folder: HeartbeatFolder, tmp_path: Path) -> None:
    folder.write(good := file())
    secret = tmp_path / f"{OTHER}.json"
    secret.write_bytes(file(OTHER).encode())
    (folder.path / f"{'1' * 16}.json").write_bytes(b"{")
    (folder.path / f"{'2' * 16}.json").write_bytes(file("2" * 16, phase="x" * MAX_FILE_BYTES).encode())
    (folder.path / f"{'3' * 16}.json").write_bytes(file(OTHER).encode())
    (folder.path / f"{OTHER}.json").symlink_to(secret)
    (folder.path / f"{'4' * 16}.json").mkdir()
    os.mkfifo(pipe := folder.path / f"{'5' * 16}.json")
    writer = os.open(pipe, os.O_RDWR)  # else a read would find its end at once
    (folder.path / f"{'6' * 16}.json").write_bytes(file("6" * 16, machine="of another host").encode())
    (folder.path / "notes.txt").write_text("somebody's")
    found = folder.contents()
    os.close(writer)
    assert found.files == [good]
    assert sorted(found.unreadable) == [f"{name}.json" for name in ("1" * 16, "2" * 16, "3" * 16, "4" * 16, "5" * 16,
                                                                    OTHER)]


def test_files_that_nobody_writes_any_more_are_deleted(folder: HeartbeatFolder) -> None:
    folder.write(file())
    folder.write(file("6" * 16, machine="of another boot"))
    unfinished = folder.path / f"{OTHER}.json.partial"
    unfinished.write_bytes(b"{")
    (folder.path / f"{'7' * 16}.json").write_bytes(b"{")
    for path in folder.path.iterdir():
        os.utime(path, (0, 0))  # as where the clock was set forward
    found = folder.contents()
    assert [f.beat.incarnation for f in found.files] == [INCARNATION], "its process can be looked at"
    assert len(list(folder.path.iterdir())) == 4, "reading deletes nothing"
    (folder.path / "new").touch()
    folder.delete_abandoned(folder.contents())
    (folder.path / "new").unlink()
    assert [path.name for path in folder.path.iterdir()] == [f"{INCARNATION}.json"]


def test_process_leaves_nothing_in_a_folder_that_is_not_of_its_user(folder: HeartbeatFolder, tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / f"{OTHER}.json").write_bytes(file(OTHER).encode())
    (home / "thesis.tex").touch()
    (tmp_path / "link").symlink_to(tmp_path / "heartbeats")
    (tmp_path / "heartbeats" / "linked").symlink_to(home)
    for elsewhere in (HeartbeatFolder(tmp_path / "link" / "j", "h0"),
                      HeartbeatFolder(tmp_path / "heartbeats" / "linked", "h0")):
        assert not elsewhere.write(file()) and not elsewhere.is_collected(INCARNATION)
        found = elsewhere.contents()
        elsewhere.remove(OTHER)
        assert (found.files, found.unreadable, found.others) == ([], {}, [])
    assert len(list(home.iterdir())) == 2
    monkeypatch.setattr(heartbeat_folder.os, "getuid", lambda: os.geteuid() + 1)
    assert not folder.write(file()) and not folder.path.exists()


def test_folder_goes_when_its_last_process_is_gone(folder: HeartbeatFolder) -> None:
    folder.write(file())
    folder.mark([INCARNATION], boottime_s() + 60.0)
    folder.discard()
    assert folder.contents().files and folder.path.exists(), "a process is there"
    folder.remove(INCARNATION)
    folder.discard()
    assert not folder.path.exists()
    assert folder.write(file()), "a process that comes later makes it again"
