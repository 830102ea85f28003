"""A log that somebody has damaged, or sent, is refused where it is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chaos_tests import report
from chaos_tests.event_log import FORM, read

FIRST = {"at": 1.0, "kind": "run", "form": FORM}


def test_only_the_last_record_may_be_long(tmp_path: Path) -> None:
    file, long = tmp_path / "events.jsonl", "x" * (9 << 20)
    end = {"at": 2.0, "kind": "end", "report": {"x": long}}
    file.write_text("".join(json.dumps(record) + "\n" for record in (FIRST, end)))
    assert [record["kind"] for record in read(file)] == ["run", "end"]
    file.write_text("".join(json.dumps(record) + "\n" for record in (FIRST, {"at": 2.0, "kind": "process", "x": long})))
    with pytest.raises(ValueError, match="line 2, .* longer than 8 MiB"):
        [*read(file)]


def test_what_is_no_text_is_said_so(tmp_path: Path) -> None:
    (file := tmp_path / "events.jsonl").write_bytes(json.dumps(FIRST).encode() + b"\n" + b"\0" * 4096 + b"\xff\n")
    with pytest.raises(ValueError, match="line 2, is no record .*utf-8"):
        [*read(file)]


def test_baseline_that_is_no_file_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / report.EVENTS).write_text(json.dumps(FIRST) + "\n")
    (tmp_path / report.BASELINE).mkdir()
    (tmp_path / report.BASELINE / report.EVENTS).symlink_to(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no regular file"):
        report.read(tmp_path)
