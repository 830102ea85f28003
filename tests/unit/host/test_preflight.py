"""Checks of `elastic-rl doctor` that look at the configuration alone."""

from __future__ import annotations

import re
import tempfile
from datetime import datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastic_rl.cli.main import app
from elastic_rl.config import parse
from elastic_rl.errors import PreflightFailed
from elastic_rl.host import preflight
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.preflight import Verdict


@pytest.mark.parametrize(("host", "cert", "warns"), [
    ("0.0.0.0", "", True), ("10.0.0.1", "", True), ("::", "", True), ("gpu-1", "", True), ("127.0.0.1", "", False),
    ("::1", "", False), ("localhost", "", False), ("0.0.0.0", "cert.pem", False)])
def test_doctor_warns_of_tokens_in_clear(host: str, cert: str, warns: bool) -> None:
    cfg = parse({"job": "x", "coordinator": {"host": host, "tls_cert": cert, "tls_key": cert and "key.pem"}})
    (finding,) = preflight._admin_api(cfg)
    assert (finding.verdict is Verdict.WARNING) is warns and bool(finding.fix) is warns


def test_doctor_refuses_a_run_dir_below_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder, verdict in ((file / "x", Verdict.FAILED), (tmp_path / "new", Verdict.OK)):
        finding = next(iter(preflight._files(parse({"run_dir": str(folder)}))))
        assert (finding.check, finding.verdict is Verdict.FAILED) == ("run_dir", verdict is Verdict.FAILED)


def test_temporary_folder_must_leave_room_for_the_sockets_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would be started again and again without end, and a shorter path comes from a person alone."""
    for length, verdict in ((28, Verdict.OK), (29, Verdict.FAILED)):
        monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * (length - 1))
        cfg = parse({})
        socket = JobPaths.of(cfg).temp / preflight._LONGEST_SOCKET
        assert (len(str(socket)) <= 107) is (verdict is Verdict.OK)
        (finding,) = preflight._temporary(cfg)
        assert finding.verdict is verdict
    (of_engines,) = preflight._temporary(parse({"pools": {"j" * 32: {"model": "m"}}}))
    assert "leave room for 16" in of_engines.found, "SGLang's sockets have the name of a pool"
    assert "leave room for 28" in finding.found and "TMPDIR" in finding.fix
    refused = CliRunner().invoke(app, ["train", "--with-cluster", "--job=never"])
    assert isinstance(refused.exception, PreflightFailed) and "TMPDIR" in refused.exception.hint


def test_sockets_of_ray_have_the_paths_that_are_reckoned_with() -> None:
    """Ray makes the name of a session from the time and its process id."""
    session = re.fullmatch(r"w/(session_\S+)_(\d+)/sockets/plasma_store", preflight._LONGEST_SOCKET)
    assert session is not None and int(session[2]) >= int(Path("/proc/sys/kernel/pid_max").read_text())
    assert session[1] == datetime(2026, 1, 1).strftime("session_%Y-%m-%d_%H-%M-%S_%f")
