"""stacks: which processes are chosen, and what is said where there are none or they may not be read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_rl.cli import main
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.host import stacks
from elastic_rl.host.processes import RUN_MARK


def run(folder: Path, *args: str) -> int:
    try:
        main.main(["stacks", *args, f"--run_dir={folder}", "--job=j"])
    except SystemExit as e:
        return int(e.code or 0)
    return 0


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the job, without a cluster."""
    mark, line = str((tmp_path / "j" / "cluster").resolve()), "import time; print(1, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", line, "a-secret"], stdout=subprocess.PIPE,
                          env={**os.environ, RUN_MARK: mark}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_stacks_are_shown_as_text_and_as_json(process: subprocess.Popen[bytes], tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "python") == 0
    said = capsys.readouterr().out
    assert said.startswith("== python") and f"(pid {process.pid})" in said and "<module> (<string>:1)" in said
    assert run(tmp_path, "-o", "json") == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["pid"] == process.pid and found["error"] == "" and "a-secret" not in json.dumps(found)


def test_job_without_processes_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path) != 0
    assert "no process of the job runs" in capsys.readouterr().err


def test_where_nothing_may_be_read_the_error_says_what_to_do(
        process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho 'Permission Denied: Try running again with elevated permissions' >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(stacks, "_py_spy", lambda: str(program))
    assert run(tmp_path) == Exit.PREFLIGHT
    said = capsys.readouterr().err
    assert "py-spy may not read" in said and "ptrace_scope" in said and "SYS_PTRACE" in said
