"""Logs that are read block by block, by positions, with nothing open in between; real files and rotations."""

from __future__ import annotations

import os
import re
import tempfile
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.telemetry import log_files
from elastic_rl.telemetry.log_files import LogPosition, before_last_lines, enforce_limits, read_from

LOST = log_files._LOST


class Limits(NamedTuple):
    log_max_bytes: int = 1
    log_backups: int = 2
    log_files: int = 50


def opener(folder: Path, n: int) -> FileIO:
    return FileIO(folder / ("a.log" + (f".{n}" if n else "")), "rb")


def drained(folder: Path, at: LogPosition, most_bytes: int) -> tuple[bytes, LogPosition]:
    """All that is there after a position."""
    found = b""
    while True:
        block, at = read_from(partial(opener, folder), at, most_bytes)
        assert len(block.replace(LOST, b"")) <= most_bytes
        assert LogPosition.parse(str(at)) == at
        if not block:
            return found, at
        found += block


@given(writes=st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.booleans()), max_size=12),
       most_bytes=st.integers(1, 64), lines=st.integers(0, 5))
@settings(max_examples=seeds(100), deadline=None)
def test_reader_gets_all_that_is_written_through_rotations(
        writes: list[tuple[bytes, bool]], most_bytes: int, lines: int) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        log, written = folder / "a.log", [b"first\n"]
        log.write_bytes(written[0])
        at = before_last_lines(partial(opener, folder), lines)
        found, at = drained(folder, at, most_bytes)
        assert found == (written[0] if lines else b"")
        for data, rotates in writes:
            with log.open("ab") as file:
                file.write(data)
            found, at = drained(folder, at, most_bytes)
            assert found == data
            if rotates:
                enforce_limits(folder, Limits())
                found, at = drained(folder, at, most_bytes)
                assert found == b"", "nothing is read twice"


@given(steps=st.lists(st.tuples(st.sampled_from(["write", "write", "rotate", "read"]), st.integers(1, 9)), max_size=16),
       most_bytes=st.sampled_from([5, 64, 1000]), backups=st.integers(1, 3), max_bytes=st.sampled_from([1, 60, 1000]))
@example(steps=[("write", 5), ("read", 1), ("rotate", 1), ("write", 5), ("rotate", 1)], most_bytes=1000, backups=1,
         max_bytes=1)  # the parts look the same from where the reader was
@settings(max_examples=seeds(60), deadline=None)
def test_reader_neither_repeats_nor_skips_silently_whatever_happens_between_two_blocks(
        steps: list[tuple[str, int]], most_bytes: int, backups: int, max_bytes: int) -> None:
    """Lines are numbered. Where some are missing, a line says so."""
    with tempfile.TemporaryDirectory() as made:
        folder, number, found = Path(made), 0, b""
        log = folder / "a.log"
        log.touch()
        at = began = before_last_lines(partial(opener, folder), 0)
        for step, count in [*steps, ("read", 1)]:
            match step:
                case "write":
                    with log.open("ab") as file:
                        for _ in range(count):
                            number += 1
                            file.write(b"%09d\n" % number)
                case "rotate":
                    enforce_limits(folder, Limits(max_bytes, backups))
                case "read":
                    block, at = drained(folder, at, most_bytes)
                    found += block
        # A reader of an empty log begins with the oldest line that is there when it first reads.
        last, missing = 0, began == LogPosition.START
        for line in re.findall(rb"\[elastic-rl: [^\n]*\]\n|[^\n]+\n", found):  # a drop may begin within a line
            if b"elastic-rl" in line:
                missing = True
            elif len(line) < 10:
                assert missing, "a part of a line"
            else:
                assert int(line) > last, "nothing is read twice"
                assert int(line) == last + 1 or missing
                last, missing = int(line), False
        assert last == number or missing


def test_log_that_others_have_truncated_is_read_from_its_beginning_with_a_line_that_says_so(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"old " * 20 + b"\n")
    _, at = drained(tmp_path, before_last_lines(partial(opener, tmp_path), 0), 1000)
    with log.open("r+b") as file:
        file.truncate(0)
        file.write(b"new " * 40 + b"\n")
    found, at = drained(tmp_path, at, 1000)
    assert found == LOST + b"new " * 40 + b"\n", "it is longer than before, so that its size says nothing"
    assert drained(tmp_path, at, 1000)[0] == b""


@given(parts=st.lists(st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"") + b"\n")), min_size=1,
                      max_size=3), lines=st.integers(0, 30))
@settings(max_examples=seeds(100), deadline=None)
def test_last_lines_begin_in_the_part_that_has_them(parts: list[list[bytes]], lines: int) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for n, part in enumerate(reversed(parts)):
            path = folder / ("a.log" + (f".{n}" if n else ""))
            path.write_bytes(b"".join(part))
            os.utime(path, (100 - n, 100 - n))  # no two are written at one time
        found, _ = drained(folder, before_last_lines(partial(opener, folder), lines), 7)
        assert found == b"".join(sum(parts, [])[-lines:] if lines else [])


def test_reader_of_a_log_that_was_replaced_goes_on_with_the_new_one(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"old\n")
    _, at = drained(tmp_path, before_last_lines(partial(opener, tmp_path), 0), 1000)
    other = tmp_path / "other"
    other.write_bytes(b"new\n")
    other.rename(log)
    assert drained(tmp_path, at, 1000)[0] == LOST + b"new\n"


def test_log_that_is_missing_is_an_error_and_its_rotated_part_is_not(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        before_last_lines(partial(opener, tmp_path), 3)
    with pytest.raises(FileNotFoundError):
        read_from(partial(opener, tmp_path), LogPosition(1, 0, 0), 10)
    (tmp_path / "a.log.1").write_bytes(b"rotated\n")
    found, at = drained(tmp_path, before_last_lines(partial(opener, tmp_path), 3), 100)
    assert found == b"rotated\n"
    (tmp_path / "a.log").write_bytes(b"again\n")
    assert drained(tmp_path, at, 100)[0] == b"again\n"


@pytest.mark.parametrize("text", ["", "1", "1-", "1-2", "-1-2-3", "1-2-3-4", "a-1-1", "1-2-" + "9" * 30, "1-2-²",
                                  "١-1-1", "1-2-3\n"])
def test_position_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no position"):
        LogPosition.parse(text)
    assert LogPosition.parse(str(LogPosition(7, 9, 3))) == LogPosition(7, 9, 3)
