"""A folder of jobs that cannot be written, as on a full disk, is said in one line with what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from elastic_rl import config, train
from elastic_rl.cli import main
from elastic_rl.errors import PreflightFailed
from elastic_rl.etcd import run_context
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import cluster_settings, processes
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import JobPaths
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.runtime.files import preflight_writes


def full(*args: Any, **more: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("error", "said", "hint"), [
    (OSError(errno.ENOSPC, "No space left on device"), "cannot write /runs/j: No space left on device", "free space"),
    (OSError(errno.EDQUOT, "Disk quota exceeded", "/runs/j/f"), "cannot write /runs/j/f: Disk quota", "free space"),
    (PermissionError(errno.EACCES, "Permission denied", b"/runs/x"), "write /runs/x: Permission", "make it writable"),
    (OSError("odd"), "cannot write /runs/j: odd", "make it writable")])
def test_error_of_the_system_names_the_path_and_what_to_do(error: OSError, said: str, hint: str) -> None:
    with pytest.raises(PreflightFailed, match=said) as e, preflight_writes(Path("/runs/j")):
        raise error
    assert e.value.hint == f"{hint}, or set another run_dir"


def test_cluster_does_not_start_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(config.parse({"run_dir": str(tmp_path), "dcs": {"arena_bytes": 1 << 20}}))
    monkeypatch.setattr(cluster_settings, "replace_file", full)
    with pytest.raises(PreflightFailed, match=f"{cluster.dir}: No space left on device"):
        cluster.up()


def test_driver_does_not_start_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config.parse({"run_dir": str(tmp_path)})
    ctx = RunContext(config=cfg, etcd_endpoints=["127.0.0.1:1"], job=cfg.job, epoch=0, model_dir="", host=LOOPBACK)
    monkeypatch.setattr(run_context, "replace_file", full)
    with pytest.raises(PreflightFailed, match=f"{JobPaths.of(cfg).private}: No space left on device"):
        train._supervise_driver(ctx, None, lambda: None, lambda: False, lambda: False)  # type: ignore[arg-type]


def test_process_whose_log_cannot_be_written_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    with pytest.raises(PreflightFailed, match=f"cannot write {tmp_path}/logs"):
        processes.spawn(["true"], log=tmp_path / "logs" / "a.log")


def test_command_that_meets_a_full_disk_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(main, "app", full)
    with pytest.raises(SystemExit) as e:
        main.main(["status"])
    assert e.value.code == 1 and capsys.readouterr().err == "error: No space left on device\n"
