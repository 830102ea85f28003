"""What a job keeps when its cluster stops, and that only a confirmed ``down --purge`` deletes it."""

from __future__ import annotations

import io
import shlex
import shutil
from pathlib import Path

import pytest

from elastic_rl.cli import main
from elastic_rl.cli.common import err
from elastic_rl.config import Config, parse
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.host import cluster_settings, kept_state
from elastic_rl.host.local_cluster import Cluster


def _started(tmp_path: Path, **more: object) -> Config:
    """The settings of a cluster, and what `up` and a run have left in its folders, without their processes."""
    cfg = parse({"job": "prod", "run_dir": str(tmp_path), **more})
    for path in (kept_state.chunks(cfg) / "ab" / "chunk", cfg.cluster_dir / "etcd" / "member" / "snap" / "db"):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 5000)
    (kept_state.chunks(cfg) / "lock").write_text("prod")
    (cfg.job_dir / "steps.jsonl").write_text("{}\n")
    cluster_settings.save(cfg, cfg.cluster_dir)
    ClusterInfo(cfg.job, ["127.0.0.1:1"], [], "", "", str(cfg.cluster_dir), own_etcd=True).save()
    return cfg


def _run(*args: str) -> int:
    with pytest.raises(SystemExit) as e:
        main.main(args)
    return int(e.value.code or 0)


def _files(cfg: Config) -> set[Path]:
    return {p for p in cfg.job_dir.rglob("*") if p.is_file() and p.name not in ("services.lock", "train.lock")}


def test_down_keeps_everything_and_says_what_and_how_to_go_on(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = _started(tmp_path)
    before = _files(cfg)
    for _ in range(2):
        assert _run("down", "--job=prod", f"--run_dir={tmp_path}") == 0
        assert _files(cfg) == before - {cfg.cluster_dir / "cluster.json"} | {cfg.cluster_dir / kept_state.STOPPED}
        said = capsys.readouterr().out
        assert str(cfg.cluster_dir / "etcd") in said and str(kept_state.chunks(cfg)) in said
        for command in ("train --with-cluster", "versions export policy OUT", "down --purge"):
            line = next(line for line in said.splitlines() if command in line)
            assert "--job=prod" in line and f"--run_dir={tmp_path}" in line


def test_purge_without_a_terminal_needs_yes_and_names_what_goes(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = _started(tmp_path)
    before = _files(cfg)
    assert _run("down", "--purge", "--job=prod", f"--run_dir={tmp_path}") == 2
    said = capsys.readouterr().err
    assert f"{cfg.cluster_dir / 'etcd'}  " in said and f"{kept_state.chunks(cfg)}  " in said and "KiB" in said
    assert "--yes" in said and _files(cfg) == before
    assert _run("down", "--purge", "--yes", "--job=prod", f"--run_dir={tmp_path}") == 0
    assert not kept_state.folders(cfg) and not Cluster(cfg).known
    assert (cfg.job_dir / "steps.jsonl").exists(), "what is no state of the cluster"


@pytest.mark.parametrize(("answer", "code"), [("n\n", 1), ("y\n", 0)])
def test_purge_asks_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int) -> None:
    cfg = _started(tmp_path)
    before = _files(cfg)
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr(type(err), "is_terminal", True)
    assert _run("down", "--purge", "--job=prod", f"--run_dir={tmp_path}") == code
    assert (_files(cfg) == before) is (code != 0)


def test_purge_goes_by_the_stored_settings_and_leaves_the_chunks_of_other_jobs(tmp_path: Path) -> None:
    cfg = _started(tmp_path / "runs", dcs={"disk_dir": str(tmp_path / "chunks")})
    bare = parse({"job": "prod", "run_dir": str(tmp_path / "runs")})
    assert kept_state.chunks(bare) == tmp_path / "chunks" / kept_state.NODE
    (kept_state.chunks(cfg) / "lock").write_text("another")
    Cluster(bare).down(purge=True)
    assert kept_state.chunks(cfg).exists() and not (cfg.cluster_dir / "etcd").exists()
    (kept_state.chunks(cfg) / "lock").write_text("prod")
    Cluster(bare).down(purge=True)
    assert not kept_state.chunks(cfg).exists()


def test_state_elsewhere_is_named_without_passwords(tmp_path: Path) -> None:
    cfg = _started(tmp_path, etcd={"endpoints": ["10.0.0.1:2379"]},
                   dcs={"durable_url": "s3://user:secret@bucket/path"})
    said = " ".join(kept_state.elsewhere(parse({"job": cfg.job, "run_dir": str(tmp_path)})))
    assert "10.0.0.1:2379" in said and "bucket" in said and "secret" not in said


@pytest.mark.parametrize(("stopped", "saved", "settings", "continues"), [
    (True, True, {}, True), (False, True, {}, True), (True, False, {}, True),
    (False, False, {}, False), (True, False, {"disk_bytes": 0}, False),
    (True, False, {"disk_bytes": 0, "durable_url": "file:///durable"}, True)])
def test_start_continues_where_records_and_versions_are_both_kept(
        tmp_path: Path, stopped: bool, saved: bool, settings: dict[str, object], continues: bool) -> None:
    cfg = _started(tmp_path, dcs=settings)
    if stopped:
        Cluster(cfg).down()
    if not saved:
        shutil.rmtree(kept_state.chunks(cfg) / "ab")
    assert kept_state.can_continue(cfg) is continues


def test_what_is_set_aside_never_replaces_anything(tmp_path: Path) -> None:
    for n in range(3):
        (tmp_path / "steps.jsonl").write_text(str(n))
        assert kept_state.set_aside(tmp_path / "steps.jsonl")
    assert {p.read_text() for p in tmp_path.iterdir()} == {"0", "1", "2"}
    assert kept_state.set_aside(tmp_path / "steps.jsonl") is None


def test_commands_are_safe_to_paste(tmp_path: Path) -> None:
    cfg = parse({"job": "prod", "run_dir": str(tmp_path / "my runs")})
    for _, line in kept_state.commands(cfg):
        assert f"--run_dir={tmp_path / 'my runs'}" in shlex.split(line)
    assert all("--run_dir" not in line for _, line in kept_state.commands(parse({"job": "prod"})))
