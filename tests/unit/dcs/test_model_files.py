"""Which files of a model's folder the stream ``model`` has, and when they count as the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs import model_files
from elastic_rl.errors import ConfigError

FILES = st.dictionaries(st.text("abc.", min_size=1, max_size=3), st.binary(max_size=4), max_size=3)


def test_weights_folders_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "modeling_own.py", "model-00001-of-00002.safetensors", ".lock",
                 "model.safetensors.index.json", "pytorch_model.bin", "consolidated.pth"):
        (tmp_path / name).write_text(name)
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "params.json").touch()
    own = {name: name.encode() for name in ("config.json", "tokenizer.json", "modeling_own.py")}
    assert model_files.read_files(tmp_path) == own
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("tool_use.jinja", ".hidden.jinja", "notes.txt"):
        (tmp_path / "additional_chat_templates" / name).write_bytes(b"T")
    assert model_files.read_files(tmp_path) == own | {"additional_chat_templates/tool_use.jinja": b"T"}


def test_folder_with_too_much_beside_its_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "_MAX_BYTES", 10)
    (tmp_path / "config.json").write_bytes(b"0123456789")
    model_files.read_files(tmp_path)
    (tmp_path / "notes.txt").write_bytes(b"0")
    with pytest.raises(ConfigError, match="beside its weights"):
        model_files.read_files(tmp_path)


@given(FILES, FILES)
def test_files_that_differ_in_a_name_or_a_byte_have_different_digests(one: dict[str, bytes], other: dict[str, bytes]
                                                                      ) -> None:
    assert (model_files.digest_of(one) == model_files.digest_of(other)) == (one == other)
