"""The key of a job's engines and routers."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from elastic_rl.errors import ConfigError
from elastic_rl.net.engine_key import create_key, key_headers, read_key


def test_key_is_made_once_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "engine.key"
    create_key(path)
    key = read_key(path)
    assert len(key) == 64 and stat.S_IMODE(path.stat().st_mode) == 0o600
    create_key(path)
    assert read_key(path) == key, "engines that run have it"
    assert key_headers(key) == {"Authorization": f"Bearer {key}"} and key_headers("") == {}


@pytest.mark.parametrize("content", [b"", b"  \n", b"two\nlines" * 9, "schl\u00fcssel".encode() * 9, b"\xff\xfe",
                                     b"0" * 31, b"0" * 257, b"0" * 10000, None])
def test_key_that_is_none_names_its_file_and_what_to_do(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "engine.key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    with pytest.raises(ConfigError, match="engine.key") as refused:
        read_key(path)
    assert "elastic-rl up" in refused.value.hint
    if content is not None:
        with pytest.raises(ConfigError):
            create_key(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_key_that_others_may_know_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "engine.key"
    create_key(path)
    path.chmod(mode)
    for use in (read_key, create_key):
        with pytest.raises(ConfigError, match=f"has the mode {mode:o}") as refused:
            use(path)
        assert "remove the file" in refused.value.hint


def test_key_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "engine.key"
    create_key(path)
    monkeypatch.setattr(os, "geteuid", lambda own=os.geteuid(): own + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        read_key(path)
