"""Failpoints: names, and the value of the environment variable."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_rl.errors import ConfigError
from elastic_rl.runtime import failpoints


def test_failpoint_and_its_count_are_read() -> None:
    assert failpoints.parse("") == ("", 1)
    assert failpoints.parse("gc.gone") == ("gc.gone", 1) and failpoints.parse("gc.gone:3") == ("gc.gone", 3)


@pytest.mark.parametrize("value", ["gc.gon", ":1", "gc.gone:0", "gc.gone:x", "gc.gone:-1"])
def test_misspelt_failpoint_is_rejected(value: str) -> None:
    with pytest.raises(ConfigError, match=failpoints.ENV):
        failpoints.parse(value)


def test_process_with_a_misspelt_failpoint_does_not_start() -> None:
    found = subprocess.run([sys.executable, "-c", "import elastic_rl.runtime.failpoints"], text=True,
                           capture_output=True, timeout=120, env={**os.environ, failpoints.ENV: "gc.gon"})
    assert found.returncode and "there is no failpoint 'gc.gon'" in found.stderr


def test_each_failpoint_is_reached_in_one_place_at_least() -> None:
    source = "".join(p.read_text() for p in Path("elastic_rl").rglob("*.py"))
    assert set(re.findall(r"reach\(\"([a-z.]+)\"\)", source)) == failpoints.POINTS
