"""What a host needs before it has ranks of a trainer group."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.driver import trainer_host
from elastic_rl.driver.trainer_host import TrainerHost
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.model_folder import fingerprint
from elastic_rl.host.paths import JobPaths
from elastic_rl.net.addresses import LOOPBACK


def context(folder: Path, **model: Any) -> RunContext:
    cfg = config.parse({"job": "j", "run_dir": str(folder / "runs"), "device": {"type": "cpu"}, "model": model})
    return RunContext(config=cfg, etcd_endpoints=["127.0.0.1:1"], job="j", epoch=1, host=LOOPBACK,
                      model_dir=str(folder / "model"))


def make_model(folder: Path, config_json: str = "{}") -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config_json)
    (folder / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that are started; none runs."""
    found: list[str] = []

    def spawn(command: list[str], **_: Any) -> subprocess.Popen[bytes]:
        found.append(next(part for part in command if part.startswith("elastic_rl.")))
        return subprocess.Popen([sys.executable, "-c", "pass"])

    monkeypatch.setattr(trainer_host.processes, "spawn", spawn)
    return found


def test_host_without_the_model_or_with_another_one_says_so_and_starts_no_agent(tmp_path: Path, spawned: list[str]
                                                                               ) -> None:
    make_model(tmp_path / "model")
    digest, ctx = fingerprint(tmp_path / "model"), context(tmp_path, path=str(tmp_path / "model"))
    assert TrainerHost(ctx, 1, 2, digest).run() == 0 and spawned.pop() == "elastic_rl.trainer.group.agent"

    (tmp_path / "model" / "config.json").write_text('{"rope_theta": 1}')
    found = TrainerHost(ctx, 1, 2, digest).run()
    assert isinstance(found, str) and "another one than on the driver's host" in found and "copy" in found
    (tmp_path / "model" / "config.json").unlink()
    found = TrainerHost(ctx, 1, 2, digest).run()
    assert isinstance(found, str) and "is not there" in found
    assert spawned == []
    formation, tags = ctx.model_copy(update={"formation": 12}), JobPaths.of(ctx.config).file_tag
    left, present = (Path(tempfile.mkdtemp(prefix=tags(ctx.group.name, n))) for n in ("2", "12"))
    assert TrainerHost(formation, 1, 1, "").run() == 0, "on the driver's host alone the agent says what is wrong"
    assert not left.exists() and present.exists(), "files of earlier formations are removed, whoever is gone"
    present.rmdir()


def test_model_that_the_settings_do_not_name_is_made_on_the_host_and_one_that_is_told_to_stop_is_no_failure(
        tmp_path: Path, spawned: list[str]) -> None:
    found = TrainerHost(context(tmp_path), 1, 2, "digest").run()
    assert isinstance(found, str) and "cannot be" in found and spawned == ["elastic_rl.data.tiny_model"]
    stopped = TrainerHost(context(tmp_path), 1, 2, "digest")
    stopped.stop()
    assert stopped.run() == 0 and "elastic_rl.trainer.group.agent" not in spawned


def test_stacks_of_ranks_that_hang_are_written_before_they_are_ended(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = tmp_path / "begun"
    body = f"import pathlib, time\ndef hangs():\n    pathlib.Path({str(begun)!r}).touch()\n    time.sleep(600)\nhangs()"
    monkeypatch.setattr(trainer_host.processes, "spawn",
                        lambda *_, **__: subprocess.Popen([sys.executable, "-c", body], start_new_session=True))
    monkeypatch.setattr(TrainerHost, "_report_stacks", lambda self, ctx, path: reported.append(path))
    reported: list[Path] = []
    ctx = context(tmp_path)
    host = TrainerHost(ctx, 1, 1, "")
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(host.run)
        wait_until(begun.exists, what="a rank that hangs")
        host.stop_hung()
        ended.result(60)
    [path] = JobPaths.of(ctx.config).hangs.iterdir()
    assert reported == [path]
    assert "hangs (<string>:4)" in path.read_text() and "the group trainer hangs" in path.read_text()


def test_ranks_that_are_to_stop_leave_no_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_host.processes, "spawn", lambda *_, **__: subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True))
    host = TrainerHost(context(tmp_path), 1, 1, "")
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(host.run)
        host.stop()
        ended.result(60)
    assert not JobPaths.of(context(tmp_path).config).hangs.exists()
