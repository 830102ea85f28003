"""The key of a job's engines and routers."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from elastic_rl.engine_key import create_key, key_headers, read_key
from elastic_rl.errors import ConfigError


def test_key_is_made_once_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "engine.key"
    create_key(path)
    key = read_key(path)
    assert len(key) == 64 and stat.S_IMODE(path.stat().st_mode) == 0o600
    create_key(path)
    assert read_key(path) == key, "engines that run have it"
    assert key_headers(key) == {"Authorization": f"Bearer {key}"} and key_headers("") == {}


@pytest.mark.parametrize("content", [b"", b"  \n", b"two\nlines", "schl\u00fcssel".encode(), b"\xff\xfe", None])
def test_key_that_is_none_names_its_file_and_what_to_do(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "engine.key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="engine.key") as refused:
        read_key(path)
    assert "elastic-rl up" in refused.value.hint
