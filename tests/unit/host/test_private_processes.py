"""What the project's processes make is their user's alone, whatever the user's umask is; artifacts follow the umask."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_rl.host.processes import spawn
from elastic_rl.pipeline.records.run_log import LineFile
from elastic_rl.runtime.files import UMASK_ENV, replace_file, user_umask

_MAKES = """
import pathlib, socket, subprocess, sys
from elastic_rl.runtime.files import replace_file
from elastic_rl.pipeline.records.run_log import LineFile
where = pathlib.Path(sys.argv[1])
socket.socket(socket.AF_UNIX).bind(str(where / "socket"))
(where / "file").touch()
(where / "folder").mkdir()
subprocess.run(["touch", where / "grandchild"], check=True)
replace_file(where / "output", "x")
LineFile(where / "steps").append(b"{}\\n")
"""


@pytest.fixture
def group_may_write() -> Iterator[None]:
    """The umask of Debian's and Fedora's users, who are alone in their group, and of those who share one."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def _modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.lstat().st_mode) for path in folder.iterdir()}


@pytest.mark.parametrize("service", [False, True])
def test_process_makes_sockets_and_files_for_its_user_alone(
        tmp_path: Path, group_may_write: None, service: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UMASK_ENV, raising=False)
    (made := tmp_path / "made").mkdir()
    process = spawn([sys.executable, "-c", _MAKES, str(made)], log=tmp_path / "log", service=service)
    assert process.wait(timeout=120) == 0, (tmp_path / "log").read_text()
    assert _modes(made) == {"socket": 0o700, "file": 0o600, "folder": 0o700, "grandchild": 0o600,
                            "output": 0o664, "steps": 0o664}, "others may read the last two, if the user lets them"


def test_artifacts_are_written_where_nobody_may_change_permissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                   ) -> None:
    """As on some mounts of FUSE and CIFS."""
    def refuse(fd: int, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    monkeypatch.setenv(UMASK_ENV, "000")  # another one than that of this process
    replace_file(tmp_path / "output", "x")
    LineFile(tmp_path / "steps").append(b"{}\n")
    assert (tmp_path / "output").read_text() == "x" and (tmp_path / "steps").read_text()


def test_artifacts_follow_the_umask_of_the_first_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UMASK_ENV, raising=False)
    before = os.umask(0o027)
    try:
        assert user_umask() == 0o027
        spawn(["env"], log=tmp_path / "env").wait(timeout=60)
        assert f"{UMASK_ENV}=027" in (tmp_path / "env").read_text().splitlines()
        monkeypatch.setenv(UMASK_ENV, "002")
        assert user_umask() == 0o002
        (records := tmp_path / "steps").touch()
        records.chmod(0o600)
        replace_file(tmp_path / "output", "x")
        LineFile(records).append(b"{}\n")
    finally:
        os.umask(before)
    assert _modes(tmp_path)["output"] == 0o664 and _modes(tmp_path)["steps"] == 0o600, "a mode that was set stays"

