"""Locks on files: who has one lives, and a file system that keeps none is refused. Holders are real processes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.waiting import wait_until

from elastic_rl.errors import PreflightFailed
from elastic_rl.host.file_lock import holders, holds, is_held, require_exclusive, taken


@contextmanager
def other_process(path: Path, how: str) -> Iterator[int]:
    """A process that has the file open, with the lock that ``how`` names."""
    program = f"import fcntl, sys, time; f = open({str(path)!r}, 'a+'); {how}; print('up', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()


EXCLUSIVE, SHARED, NONE = "fcntl.flock(f, fcntl.LOCK_EX)", "fcntl.flock(f, fcntl.LOCK_SH)", "pass"


def test_exclusive_lock_is_of_one_open_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_held(path), "there is no file"
    with path.open("w") as one, path.open("w") as other:
        assert not is_held(path)
        assert taken(one) and not taken(other) and not taken(other, shared=True) and is_held(path)
        one.close()
        assert not is_held(path) and taken(other)


def test_shared_lock_is_of_several_open_files_and_excludes_the_exclusive_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as one, path.open() as other, path.open("w") as third:
        assert taken(one, shared=True) and taken(other, shared=True) and not taken(third)
        assert not is_held(path), "callers of is_held would see each other"


def test_lock_is_waited_for_until_its_holder_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with other_process(path, EXCLUSIVE) as pid, path.open("w") as lock:
        assert is_held(path) and not taken(lock, timeout_s=0.05)
        os.kill(pid, 9)
        assert taken(lock, timeout_s=60.0)


def test_holders_have_the_lock_and_not_merely_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with other_process(path, NONE) as opened, other_process(path, EXCLUSIVE) as held:
        assert holders(path) == [held] and holds(held, path) and not holds(opened, path)
    wait_until(lambda: not is_held(path), what="the kernel to release the lock")
    with other_process(path, SHARED) as shared:
        assert holders(path) == [] and not holds(shared, path)
    with path.open("w") as lock:
        assert taken(lock) and holds(os.getpid(), path) and holders(path) == [], "this process is no other one"


def test_lock_is_searched_for_once_and_seen_wherever_it_is_after_that(tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    path, listed, listdir = tmp_path / "lock", list[str](), os.listdir

    def counted(folder: str) -> list[str]:
        listed.append(folder)
        return listdir(folder)

    monkeypatch.setattr("elastic_rl.host.file_lock.os.listdir", counted)
    with other_process(path, EXCLUSIVE) as pid:
        assert all(holds(pid, path) for _ in range(5)) and listed == [f"/proc/{pid}/fd"]
        path.rename(tmp_path / "moved")
        assert not holds(pid, path), "there is no file"
        with path.open("w") as other:
            assert not holds(pid, path), "it is another file, which nobody has locked"
            assert taken(other) and not holds(pid, path) and holds(os.getpid(), path)
            elsewhere = os.dup(other.fileno())
            other.close()
            assert holds(os.getpid(), path), "the lock has another descriptor now"
            os.close(elsewhere)
            assert not holds(os.getpid(), path)
        assert holds(pid, tmp_path / "moved")
    assert not holds(pid, tmp_path / "moved"), "it has ended"


def test_holders_are_found_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    with other_process(tmp_path / "folder" / "lock", EXCLUSIVE) as held:
        assert holders(tmp_path / "link" / "lock") == [held]


def test_file_system_with_locks_is_accepted_also_while_the_lock_is_held(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    require_exclusive(path)
    with other_process(path, EXCLUSIVE):
        require_exclusive(path)


def test_file_system_that_gives_a_lock_to_everybody_is_refused(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", lambda file, how: None)
    with pytest.raises(PreflightFailed, match=f"{tmp_path} does not keep locks") as refused:
        require_exclusive(tmp_path / "lock")
    assert "run_dir on a local disk" in refused.value.hint


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(PreflightFailed, match=rf"lock cannot be locked: {os.strerror(code)}") as refused:
        require_exclusive(tmp_path / "lock")
    assert "run_dir on a local disk" in refused.value.hint


def test_other_errors_of_a_lock_are_no_lack_of_locks(tmp_path: Path) -> None:
    file = (tmp_path / "lock").open("w")
    file.close()
    with pytest.raises(ValueError, match="closed file"):
        taken(file)


def test_up_refuses_a_run_dir_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_rl import config
    from elastic_rl.host.local_cluster import Cluster
    cluster = Cluster(config.parse({"job": "j", "run_dir": str(tmp_path)}))
    monkeypatch.setattr("fcntl.flock", lambda file, how: None)
    with pytest.raises(PreflightFailed, match="does not keep locks"):
        cluster.up()
    assert not cluster.paths.settings.exists() and not cluster.agents.all()
