"""One `train` command at a time trains a job, and what stops the job ends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_rl.errors import ConfigError
from elastic_rl.host import train_lock

HOLD = """
import signal, sys, time
from pathlib import Path
from elastic_rl.host import train_lock
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
with train_lock.held(Path(sys.argv[1]) / "train.lock", "a-job"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_holder_is_named_to_others_and_ended_by_its_number(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="a-job is already being trained"), \
                train_lock.held(tmp_path / "train.lock", "a-job"):
            pass
        assert train_lock.end_holder(tmp_path / "train.lock", timeout_s=60.0) == holder.pid
        assert holder.wait(60) == 7
    finally:
        holder.kill()
        holder.wait()
    assert train_lock.end_holder(tmp_path / "train.lock", timeout_s=0.0) == 0
    with train_lock.held(tmp_path / "train.lock", "a-job"):
        assert train_lock.end_holder(tmp_path / "train.lock", timeout_s=0.0) == 0, "it does not end itself"


def test_process_that_does_not_hold_the_lock_is_left_alone(tmp_path: Path) -> None:
    """Of another machine that shares the folder, or of one that has ended long ago."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for written in (str(other.pid), "", "no number", "999999999"):
            (tmp_path / "train.lock").write_text(written)
            assert train_lock.end_holder(tmp_path / "train.lock", timeout_s=0.0) == 0
        assert other.poll() is None and holder.poll() is None
    finally:
        for process in (other, holder):
            process.kill()
            process.wait()
