"""What a job keeps when its cluster stops, and that only a confirmed ``down --purge`` deletes it."""

from __future__ import annotations

import io
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from support.waiting import wait_until

from elastic_rl.cli import main, run
from elastic_rl.cli.common import err
from elastic_rl.config import Config, parse
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ConfigError, ElasticRLError
from elastic_rl.host import cluster_settings, kept_state
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.host.processes import OWNER_ENV


def _started(tmp_path: Path, **more: object) -> Config:
    """The settings of a cluster, and what `up` and a run have left in its folders, without their processes."""
    cfg = parse({"job": "prod", "run_dir": str(tmp_path), **more})
    for path in (kept_state.chunks(cfg) / "ab" / "chunk", ClusterPaths.of(cfg).etcd / "member" / "snap" / "db"):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 5000)
    (kept_state.chunks(cfg) / "lock").write_text("prod")
    JobPaths.of(cfg).steps.write_text("{}\n")
    cluster_settings.save(cfg, ClusterPaths.of(cfg).settings)
    ClusterInfo(cfg.job, ["127.0.0.1:1"], [], "", own_etcd=True).save(ClusterPaths.of(cfg).info)
    return cfg


def _start_node(cfg: Config, program: str) -> None:
    """Starts a process in the place of the DCS node, and waits until its shell runs ``program``."""
    log = cfg.run_dir / "node.log"
    Cluster(cfg).services.start(Cluster(cfg).node, ["sh", "-c", f"echo up; {program}"], log=log,
                                env={OWNER_ENV: str(JobPaths.of(cfg).private)})
    wait_until(lambda: "up" in log.read_text(), what="the node")


def _run(*args: str) -> int:
    with pytest.raises(SystemExit) as e:
        main.main(args)
    return int(e.value.code or 0)


def _files(cfg: Config) -> set[Path]:
    return {p for p in JobPaths.of(cfg).folder.rglob("*") if p.is_file() and p.parent.name != "services"
            and p.name not in ("services.lock", "train.lock")}


def test_down_keeps_everything_and_says_what_and_how_to_go_on(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = _started(tmp_path)
    before = _files(cfg)
    _start_node(cfg, "sleep 600")
    for _ in range(2):
        assert _run("down", "--job=prod", f"--run_dir={tmp_path}") == 0
        assert _files(cfg) == before - {ClusterPaths.of(cfg).info} | {ClusterPaths.of(cfg).stopped}
        said = capsys.readouterr().out
        assert str(ClusterPaths.of(cfg).etcd) in said and str(kept_state.chunks(cfg)) in said
        for command in ("train --with-cluster", "versions export policy OUT", "down --purge"):
            line = next(line for line in said.splitlines() if command in line)
            assert "--job=prod" in line and f"--run_dir={tmp_path}" in line


def test_purge_without_a_terminal_needs_yes_and_names_what_goes(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = _started(tmp_path)
    before = _files(cfg)
    assert _run("down", "--purge", "--job=prod", f"--run_dir={tmp_path}") == 2
    said = capsys.readouterr().err
    assert f"{JobPaths.of(cfg).private / 'etcd'}  " in said and f"{kept_state.chunks(cfg)}  " in said and "KiB" in said
    assert "--yes" in said and _files(cfg) == before
    assert _run("down", "--purge", "--yes", "--job=prod", f"--run_dir={tmp_path}") == 0
    assert not kept_state.folders(cfg) and not Cluster(cfg).known
    assert JobPaths.of(cfg).steps.exists(), "what is no state of the cluster"


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


def test_purge_follows_stored_settings_and_leaves_other_jobs_chunks(tmp_path: Path) -> None:
    cfg = _started(tmp_path / "runs", dcs={"disk_dir": str(tmp_path / "chunks")})
    bare = parse({"job": "prod", "run_dir": str(tmp_path / "runs")})
    assert kept_state.chunks(bare) == tmp_path / "chunks" / "node-0"
    (kept_state.chunks(cfg) / "lock").write_text("another")
    Cluster(bare).down(purge=True)
    assert kept_state.chunks(cfg).exists() and not ClusterPaths.of(cfg).etcd.exists()
    (kept_state.chunks(cfg) / "lock").write_text("prod")
    cluster_settings.save(cfg, ClusterPaths.of(cfg).settings)
    Cluster(bare).down(purge=True)
    assert not kept_state.chunks(cfg).exists()


def test_state_elsewhere_is_named_without_passwords(tmp_path: Path) -> None:
    cfg = _started(tmp_path, etcd={"endpoints": ["10.0.0.1:2379"]},
                   dcs={"durable_url": "s3://user:secret@bucket/path"})
    said = " ".join(kept_state.elsewhere(parse({"job": cfg.job, "run_dir": str(tmp_path)})))
    assert "10.0.0.1:2379" in said and "bucket" in said and "secret" not in said


DURABLE = {"disk_bytes": 0, "durable_url": "file:///durable"}


@pytest.mark.parametrize(("stopped", "saved", "settings", "continues"), [
    (True, True, {}, True), (False, True, {}, True), (True, False, {}, True),
    (False, False, {}, False), (True, False, {"disk_bytes": 0}, False), (True, True, {"disk_bytes": 0}, False),
    (True, False, DURABLE, True), (False, False, DURABLE, True)])
def test_start_continues_where_records_and_versions_are_both_kept(
        tmp_path: Path, stopped: bool, saved: bool, settings: dict[str, object], continues: bool) -> None:
    cfg = _started(tmp_path, dcs=settings)
    if stopped:
        _start_node(cfg, "sleep 600")
        Cluster(cfg).down()
    if not saved:
        shutil.rmtree(kept_state.chunks(cfg) / "ab")
    assert kept_state.can_continue(cfg) is continues


@pytest.mark.parametrize("node", ["trap '' TERM; echo trapped; while :; do sleep 600; done", ""])
def test_node_that_saved_nothing_continues_from_its_chunks(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str) -> None:
    monkeypatch.setattr("elastic_rl.host.local_cluster.SAVE_GRACE_S", 0.2)
    cfg = _started(tmp_path)
    if node:
        _start_node(cfg, node)
        wait_until(lambda: "trapped" in (tmp_path / "node.log").read_text(), what="the trap")
    for _ in range(2):
        Cluster(cfg).down()
    assert Cluster(cfg).known and kept_state.can_continue(cfg), "some were saved"
    shutil.rmtree(kept_state.chunks(cfg) / "ab")
    assert not kept_state.can_continue(cfg)


def test_down_says_where_versions_are_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = _started(tmp_path, dcs={"disk_bytes": 0})
    shutil.rmtree(kept_state.chunks(cfg))
    _start_node(cfg, "sleep 600")
    assert _run("down", "--job=prod", f"--run_dir={tmp_path}") == 0
    said = capsys.readouterr().out
    assert "its versions were in memory only, and are gone with the nodes" in said
    assert "resume" not in said and "export" not in said and "down --purge" in said


def test_end_of_a_run_says_how_long_saving_may_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run._stop(Cluster(_started(tmp_path)), after=KeyboardInterrupt())
    assert "saving versions, at most 90 s" in capsys.readouterr().out


def test_start_refuses_another_disk_than_that_of_the_versions(tmp_path: Path) -> None:
    cfg = _started(tmp_path)
    Cluster(cfg).down()
    moved = cfg.model_copy(update={"dcs": cfg.dcs.model_copy(update={"disk_dir": str(tmp_path / "other")})})
    with pytest.raises(ConfigError) as e:
        Cluster(moved).up()
    assert str(kept_state.chunks(cfg)) in e.value.message and str(tmp_path / "other" / "node-0") in e.value.message
    shutil.move(kept_state.chunks(cfg), tmp_path / "other" / "node-0")
    kept_state.require_same_disk(moved)


# -- what is deleted ---------------------------------------------------------------------------------------------------
def test_purge_without_a_job_takes_no_other_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = _started(tmp_path)
    before = _files(cfg)
    assert _run("down", "--purge", "--yes", f"--run_dir={tmp_path}") == 2
    assert "--job=NAME" in capsys.readouterr().err
    assert _run("down", "--purge", f"--run_dir={tmp_path}") == 0
    said = capsys.readouterr().out
    assert f"has no state in {tmp_path}" in said and "deleted" not in said
    assert _files(cfg) == before


def test_purge_names_what_it_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = _started(tmp_path)
    assert _run("down", "--purge", "--yes", "--job=typo", f"--run_dir={tmp_path}") == 0
    said = capsys.readouterr().out
    assert f"job typo has no state in {tmp_path}" in said and "deleted" not in said
    assert _run("down", "--purge", "--yes", "--job=prod", f"--run_dir={tmp_path}") == 0
    out, asked = capsys.readouterr()
    for path in (ClusterPaths.of(cfg).etcd, kept_state.chunks(cfg)):
        assert f"deleted     {path}" in out and f"delete  {path}  " in asked
    assert "KiB" in asked and not cluster_settings.stored(ClusterPaths.of(cfg).settings), "they hold passwords"


class _Killed(BaseException):
    pass


def test_killed_purge_is_completed_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = _started(tmp_path / "runs", dcs={"disk_dir": str(tmp_path / "chunks")})
    bare = parse({"job": "prod", "run_dir": str(tmp_path / "runs")})

    def killed(path: Path) -> None:
        raise _Killed

    with monkeypatch.context() as patch, pytest.raises(_Killed):
        patch.setattr(kept_state.shutil, "rmtree", killed)
        Cluster(bare).down(purge=True)
    assert not kept_state.can_continue(bare) and not kept_state.chunks(cfg).exists()
    assert [f.path.name.partition(".")[0] for f in kept_state.folders(bare)] == ["etcd", "node-0"]
    Cluster(bare).down(purge=True)
    assert not kept_state.folders(cfg) and not list((tmp_path / "chunks").iterdir())


@pytest.mark.parametrize("name", ["etcd", "disk/node-0"])
def test_purge_refuses_links_before_it_deletes_anything(tmp_path: Path, name: str) -> None:
    cfg = _started(tmp_path)
    link = JobPaths.of(cfg).private / name
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ElasticRLError, match=f"{link} is a link to {tmp_path / 'elsewhere'}"):
        Cluster(cfg).down(purge=True)
    assert len(kept_state.folders(cfg)) == 2 and any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("stored", [
    {"etcd": {"endpoints": 7}}, {"dcs": {"disk_dir": "~nosuch/x"}}, {"dcs": {"disk_dir": 7}}, {"dcs": 7}])
def test_down_and_purge_work_with_invalid_stored_settings(tmp_path: Path, stored: dict[str, object]) -> None:
    cfg = _started(tmp_path)
    for purge in ([], ["--purge", "--yes"]):
        cluster_settings.restore(ClusterPaths.of(cfg).settings, yaml.safe_dump(stored).encode())
        assert _run("down", "--job=prod", f"--run_dir={tmp_path}", *purge) == 0
    assert not ClusterPaths.of(cfg).etcd.exists()


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


@pytest.mark.parametrize(("mode", "exports"), [("rl", True), ("sft", True), ("eval", False),
                                               ("rejection_sampling", False)])
def test_only_a_job_that_trains_is_offered_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str,
                                                     exports: bool) -> None:
    monkeypatch.setattr(kept_state, "can_continue", lambda cfg: True)
    found = dict(kept_state.commands(parse({"job": "prod", "run_dir": str(tmp_path), "mode": mode})))
    assert "resume" in found and ("export" in found) is exports


def test_hints_to_stop_a_job_name_its_run_dir(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = _started(tmp_path, etcd={"endpoints": ["10.0.0.1:2379"]})
    other = parse({"job": "prod", "run_dir": str(tmp_path)})
    for command in ("elastic-rl down", "elastic-rl down --purge"):
        with pytest.raises(ConfigError) as e:
            Cluster(other).up()
        assert f"{command} --job=prod --run_dir={tmp_path}" in e.value.hint
        Cluster(cfg).down()
    info = ClusterInfo("prod", [], [], "")
    run._print_access(cfg, info)
    assert f"elastic-rl down --job=prod --run_dir={tmp_path}" in capsys.readouterr().out
