"""The environment of the driver, which Ray's processes and the roles inherit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_rl import config
from elastic_rl.host import processes
from elastic_rl.host.ray_node import compute_environment


def test_driver_has_nothing_of_another_ray_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray takes RAY_AUTH_TOKEN before the file with the job's own token, whose path the driver sets at its epoch."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS", "KEPT"):
        monkeypatch.setenv(name, "of the user")
    cfg = config.load(overrides=[f"--run_dir={tmp_path}"])
    log = tmp_path / "log"
    assert processes.spawn(["env"], log=log, env=compute_environment(cfg)).wait(timeout=60) == 0
    found = dict(line.partition("=")[::2] for line in log.read_text().splitlines())
    assert not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"} & found.keys()
    assert found["KEPT"] == "of the user" and found["RAY_AUTH_MODE"] == "token"
    assert os.environ["RAY_AUTH_TOKEN"] == "of the user"
