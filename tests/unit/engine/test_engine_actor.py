"""The end of an engine that hangs: its process, of which this one is a real one, is killed in any case."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_BODY = """
import os, sys
from elastic_rl.engine.actor import EngineActor

class Runner:
    def write_stacks(self, why, pids, *, report):
        assert list(pids) == [os.getpid()] and report
        print("written", flush=True)
        {then}

actor = EngineActor.__new__(EngineActor)
actor._runner = Runner()
actor.kill_hung()
print("lives", flush=True)
"""


@pytest.mark.parametrize("then", ["return", "raise RuntimeError('no stacks')"])
def test_engine_that_hangs_is_killed_once_its_stacks_are_written_or_cannot_be(then: str) -> None:
    ended = subprocess.run([sys.executable, "-c", _BODY.format(then=then)], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "written\n"), ended.stderr
