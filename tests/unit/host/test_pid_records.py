"""Records of services: they recognise a process under a moved clock, and no other one with its pid."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elastic_rl.host.processes import PidRecord, PidRecords


def test_record_recognises_its_process_after_the_clock_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = PidRecords(tmp_path)
    book.add("me", os.getpid(), "127.0.0.1:1")
    started = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: started(self) + 3600)
    [record] = book.all()
    assert record.alive() and record.url == "127.0.0.1:1"


def test_record_is_of_one_process_of_one_boot() -> None:
    record = PidRecord.of("me", os.getpid())
    assert record.alive()
    assert not dataclasses.replace(record, start_ticks=record.start_ticks + 1).alive(), "a later process with this pid"
    assert not dataclasses.replace(record, boot="another").alive()


def test_ended_process_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record = PidRecord.of("child", child.pid)
    assert record.alive()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # now a zombie
    assert not record.alive()
    child.communicate()
    assert not record.alive()
    with pytest.raises(ProcessLookupError):
        PidRecord.of("child", child.pid)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"name": "x", "pid": 1, "create_time": 1.5}'])
def test_damaged_record_is_left_out_and_can_be_cleared(tmp_path: Path, content: str) -> None:
    book = PidRecords(tmp_path)
    good = book.add("good", os.getpid())
    (tmp_path / "etcd-0.json").write_text(content)
    assert book.all() == [good]
    book.clear()
    assert list(tmp_path.iterdir()) == []
