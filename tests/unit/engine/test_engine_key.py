"""The file with the key of a job's engines and routers."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_rl.errors import ConfigError
from elastic_rl.net.engine_key import EngineAccess, read_key


def _file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "engine.key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_key_is_read_from_its_file(tmp_path: Path) -> None:
    key = read_key(_file(tmp_path, b"0123" * 16 + b"\n"))
    assert key == "0123" * 16
    assert EngineAccess(key).headers == {"Authorization": f"Bearer {key}"} and EngineAccess("").headers == {}


@pytest.mark.parametrize(("content", "mode"), [(b"short", 0o600), (b"0" * 64, 0o640)])
def test_key_that_is_none_or_open_to_others_names_its_file_and_what_to_do(
        tmp_path: Path, content: bytes, mode: int) -> None:
    with pytest.raises(ConfigError, match="the key of the engines, .*engine.key") as refused:
        read_key(_file(tmp_path, content, mode))
    assert "remove the file" in refused.value.hint
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(tmp_path / "none")
