"""Streams of a program, whatever they were when it started."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from elastic_rl.runtime.text_encoding import use_utf8


def test_output_whose_file_is_a_pipe_now_takes_any_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONUTF8", "PYTHONIOENCODING"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    out = io.TextIOWrapper(io.BufferedWriter(io.FileIO(fd, "w")), encoding="ascii")
    out.write("x")
    out.flush()
    reading, writing = os.pipe()
    os.dup2(writing, fd)
    os.close(writing)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    use_utf8()
    out.write("ä\udcff")
    out.flush()
    assert os.read(reading, 100) == "ä".encode(out.encoding, "backslashreplace") + b"\\udcff"
    os.close(reading)
    out.close()
