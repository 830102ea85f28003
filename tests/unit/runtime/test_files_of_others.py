"""Files that somebody else has made are read within limits: their kind, their size, and what they stand for."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.data.model_tokenizer import ModelTokenizer
from elastic_rl.data.rows import JsonlRows
from elastic_rl.dcs.versions import hf_folder
from elastic_rl.errors import ConfigError
from elastic_rl.host.model_folder import fingerprint
from elastic_rl.models.arch import MAX_CONFIG_BYTES, read_json
from elastic_rl.runtime.files import read_limited


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 << 30)


UNREADABLE = pytest.mark.parametrize("make", [_fifo, _sparse, Path.mkdir, lambda path: path.symlink_to("/dev/zero")],
                                     ids=["fifo", "8 GiB", "folder", "device"])


@UNREADABLE
def test_config_of_a_model_is_a_regular_file_of_bounded_size(tmp_path: Path, make: Any) -> None:
    make(path := tmp_path / "config.json")
    for read in (lambda: read_json(path), lambda: fingerprint(tmp_path), lambda: hf_folder._config(tmp_path, [])):
        with pytest.raises(ConfigError, match="config.json"):
            read()


@UNREADABLE
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"])
def test_tokenizer_of_what_is_no_regular_file_is_refused(tmp_path: Path, make: Any, name: str) -> None:
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name} is no regular file, or larger than"):
        _ = ModelTokenizer(tmp_path).chat_template


def test_file_is_read_whole_up_to_its_limit(tmp_path: Path) -> None:
    (path := tmp_path / "a").write_bytes(b"x" * 100)
    assert read_limited(path, 100) == b"x" * 100
    with pytest.raises(OSError, match="larger than"):
        read_limited(path, 99)
    path.write_text('{"a": "' + "x" * (MAX_CONFIG_BYTES - 9) + '"}')
    assert len(read_json(path)["a"]) == MAX_CONFIG_BYTES - 9


@pytest.mark.parametrize(("text", "why"), [
    ("\n".join(["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]",
                *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))]), "stand for more than"),
    ("\n".join(["a0: &a0 {k: 1, l: 1, m: 1}",
                *(f"a{n}: &a{n} {{k{n}: *a{n - 1}, l{n}: *a{n - 1}, m{n}: *a{n - 1}}}" for n in range(1, 15))]),
     "stand for more than"),
    ("a: &a [*a]", "contains itself"), ("a: &a {b: *a}", "contains itself"), ("a: " + "[" * 5000, "nested too deeply"),
    ("a: " + "x" * (5 << 20), "more than 4 MiB")], ids=["lists", "mappings", "own", "own-mapping", "nested", "long"])
def test_settings_stand_for_a_bounded_number_of_values(tmp_path: Path, text: str, why: str) -> None:
    (path := tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=why) as refused:
        config.load(path, [])
    assert len(str(refused.value)) < 1000


def test_settings_may_use_anchors(tmp_path: Path) -> None:
    (path := tmp_path / "a.yaml").write_text(
        "rollout: {reward_options: {a: &a {x: 1}, b: *a, c: {<<: *a, y: 2}}}\n")
    assert config.load(path, []).rollout.reward_options == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}


def test_rows_that_unpack_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.data.rows._FREE_UNPACKED", 1 << 20)
    (path := tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"a": "b"}\n' * (1 << 20)))
    with pytest.raises(ConfigError, match="unpacks to more than 100 times its size"):
        JsonlRows(path, tmp_path / "derived")
