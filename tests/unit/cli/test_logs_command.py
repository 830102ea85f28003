"""logs: how a part is named, and what is shown of its log, by the files alone."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.waiting import wait_until

from elastic_rl.cli import main
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.host.paths import JobPaths
from elastic_rl.telemetry.log_files import enforce_limits


@dataclass(frozen=True)
class _Limits:
    log_max_bytes: int = 8
    log_backups: int = 2
    log_files: int = 20


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    """A job with the logs of three processes; no cluster is up."""
    paths = JobPaths(tmp_path / "j")
    paths.logs.mkdir(parents=True)
    for part in ("engine-1", "engine-12", "driver"):
        paths.log(part).write_text("".join(f"{part} line {n}\n" for n in range(200)))
    Path(f"{paths.log('driver')}.1").write_text("rotated away\n")
    return paths


def command(paths: JobPaths, *args: str) -> list[str]:
    return ["logs", *args, f"--run_dir={paths.folder.parent}", "--job=j"]


def run(paths: JobPaths, *args: str) -> int:
    with pytest.raises(SystemExit) as e:
        main.main(command(paths, *args))
    return int(e.value.code or 0)


@pytest.fixture
def following(paths: JobPaths) -> Iterator[subprocess.Popen[bytes]]:
    """A process that follows the log of a part that has none yet."""
    process = subprocess.Popen([sys.executable, "-m", "elastic_rl.cli.main", *command(paths, "router-a", "-f")],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_parts_with_a_log_are_listed(paths: JobPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(paths, "-o", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["part"] for row in rows] == ["driver", "engine-1", "engine-12"]
    found = paths.log("driver").stat()
    assert rows[0] == {"part": "driver", "nbytes": found.st_size, "written_at": found.st_mtime,
                       "path": str(paths.log("driver"))}
    assert run(paths) == 0
    assert str(paths.log("engine-12")) in capsys.readouterr().out


@pytest.mark.parametrize(("args", "first", "count"), [
    (("driver",), "driver line 100", 100), (("d", "--lines=2"), "driver line 198", 2), (("-n", "0", "d"), "", 0),
    (("engine-1", "-n1"), "engine-1 line 199", 1), (("engine-12", "-n1"), "engine-12 line 199", 1),
    (("driver", "-n500"), "rotated away", 201)])
def test_last_lines_of_a_part_are_shown(args: tuple[str, ...], first: str, count: int, paths: JobPaths,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    assert run(paths, *args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == count and lines[:1] == ([first] if first else [])


def test_part_may_follow_a_setting_of_two_words(paths: JobPaths, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main.main(["logs", "--run_dir", str(paths.folder.parent), "--job", "j", "driver", "-n1"])
    assert e.value.code in (0, None) and capsys.readouterr().out == "driver line 199\n"


@pytest.mark.parametrize(("args", "said"), [
    (("eng",), "several logs begin with 'eng'\nhint: name one: engine-1, engine-12"),
    (("eng", "-f"), "several logs begin with 'eng'"),
    (("router-a",), "there is no log of 'router-a'\nhint: parts with a log: driver, engine-1, engine-12"),
    (("../../secret", "-f"), "there is no log of '../../secret'"), (("-f",), "--follow needs a part"),
    (("driver", "engine-1"), "unexpected argument 'engine-1'\nhint: this command takes no more arguments"),
    (("driver", "--host=b"), "--host is for a host of a cluster with a name\nhint: leave it out")])
def test_ambiguous_and_unknown_parts_are_wrong_usage(args: tuple[str, ...], said: str, paths: JobPaths,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    assert run(paths, *args) == Exit.USAGE
    assert said in capsys.readouterr().err


def test_job_without_logs_says_how_to_find_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = JobPaths(tmp_path / "j")
    assert run(nothing, "driver") == Exit.USAGE
    assert "`elastic-rl jobs --run_dir=" in capsys.readouterr().err
    assert run(nothing) == 0


def test_part_is_followed_from_its_first_line_through_a_rotation(paths: JobPaths,
                                                                following: subprocess.Popen[bytes]) -> None:
    assert following.stdout is not None and following.stderr is not None
    assert b"waiting for" in following.stderr.readline()
    with paths.log("router-a").open("ab", buffering=0) as log:
        log.write(b"\x1b[31mred\n")
        assert following.stdout.readline() == b"\x1b[31mred\n", "a pipe gets what is written"

        def rotated() -> bool:
            enforce_limits(paths.logs, _Limits())  # gives up while it is read
            return not os.fstat(log.fileno()).st_size

        wait_until(rotated, what="a rotation between two reads")
        log.write(b"next\n")
        assert following.stdout.readline() == b"next\n"
        following.stdout.close()

        def ended() -> bool:
            log.write(b"nobody reads this\n")
            return following.poll() is not None

        wait_until(ended, what="the end of a follower whose reader has ended")
    assert following.returncode == 0 and following.stderr.read() == b""


def test_terminal_gets_no_control_characters(paths: JobPaths) -> None:
    paths.log("driver").write_bytes("\x1b[31mré\x07d\n".encode() + b"\xff")
    keyboard, terminal = pty.openpty()
    try:
        subprocess.run([sys.executable, "-m", "elastic_rl.cli.main", *command(paths, "driver", "-n2")], stdout=terminal,
                       check=True, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
        shown = os.read(keyboard, 1000).decode()
        assert shown == "\ufffd[31mré\ufffdd\r\n\ufffd"
    finally:
        os.close(keyboard)
        os.close(terminal)


def test_completion_knows_the_parts(paths: JobPaths) -> None:
    line = f"elastic-rl logs --run_dir={paths.folder.parent} --job=j eng"
    done = subprocess.run([sys.executable, "-m", "elastic_rl.cli.main"], capture_output=True, text=True, env={
        **os.environ, "_ELASTIC_RL_COMPLETE": "complete_bash", "COMP_CWORD": "4", "COMP_WORDS": line})
    assert done.stdout.split() == ["engine-1", "engine-12"]
