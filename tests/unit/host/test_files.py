"""Replacing a file as a whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO

import pytest

from elastic_rl.errors import PreflightFailed
from elastic_rl.runtime.files import private_folder, replace_file


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("content", ["é", "é".encode(), lambda file: file.write("é".encode())])
def test_content_is_replaced_and_nothing_else_is_left(tmp_path: Path, content: object, durable: bool) -> None:
    path = tmp_path / "f.json"
    path.write_text("before")
    (tmp_path / "f.json.7.partial").write_text("of a process that was killed, and longer")
    replace_file(path, content, mark="7", durable=durable)  # type: ignore[arg-type]
    assert path.read_text() == "é" and list(tmp_path.iterdir()) == [path]


def test_failure_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("before")

    def fails(file: IO[bytes]) -> None:
        file.write(b"half")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        replace_file(path, fails)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "none" / "f", "x")


def test_private_file_is_its_owners_only_and_links_are_not_written_through(tmp_path: Path) -> None:
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "token"
    elsewhere.write_text("of somebody else")
    path.symlink_to(elsewhere)
    (tmp_path / "token.partial").symlink_to(elsewhere)
    replace_file(path, "secret", private=True)
    assert elsewhere.read_text() == "of somebody else" and not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_text() == "secret"


def test_private_folder_is_made_or_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    for _ in range(2):
        private_folder(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder.chmod(0o777)


def test_private_folder_is_refused_where_another_user_may_have_put_something(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, link, file = tmp_path / "theirs", tmp_path / "link", tmp_path / "file"
    theirs.mkdir()
    link.symlink_to(theirs)
    file.touch()
    for path in (link, file):
        with pytest.raises(PreflightFailed, match="TMPDIR"):
            private_folder(path)
    monkeypatch.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
    with pytest.raises(PreflightFailed, match="not a folder of this user"):
        private_folder(theirs)
