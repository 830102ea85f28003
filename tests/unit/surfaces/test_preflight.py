"""Checks of `elastic-rl doctor` that look at the configuration alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_rl.config import parse
from elastic_rl.host import preflight
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
