"""The settings and tokens of a cluster: private, kept by later commands; and what ``up`` refuses and ``down`` keeps."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import pytest
import typer
import yaml

from elastic_rl.cli import common
from elastic_rl.config import Config, parse
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ConfigError, PreflightFailed
from elastic_rl.host import cluster_settings, etcd_server, processes
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.host.processes import OWNER_ENV

EXTERNAL = ["10.0.0.1:2379"]


def _config(tmp_path: Path, **more: object) -> Config:
    return parse({"job": "prod", "run_dir": str(tmp_path), **more})


def _started(cfg: Config) -> Path:
    """What `up` leaves in the folder, without its processes. Returns the chunk on the node's disk."""
    chunk = JobPaths.of(cfg).disk / "node-0" / "ab" / "chunk"
    chunk.parent.mkdir(parents=True)
    chunk.touch()
    (ClusterPaths.of(cfg).etcd / "member").mkdir(parents=True)
    cluster_settings.save(cfg, ClusterPaths.of(cfg).settings)
    ClusterInfo(cfg.job, cfg.etcd.endpoints or ["127.0.0.1:1"], [], "",
                own_etcd=not cfg.etcd.endpoints).save(ClusterPaths.of(cfg).info)
    return chunk


def _cluster(tmp_path: Path, *args: str, file: Path | None = None) -> Cluster:
    """The cluster that a command line addresses."""
    context = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))
    context.args = [f"--run_dir={tmp_path}", *args]
    return common.find_cluster(context, file)


def test_settings_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    cfg = _config(tmp_path, alerts={"urls": ["json://user:secret@host"]})
    JobPaths.of(cfg).private.mkdir(parents=True)
    path = ClusterPaths.of(cfg).settings
    cluster_settings.save(cfg, path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert "secret" in path.read_text(), "the services read it"
    assert parse(cluster_settings.stored(ClusterPaths.of(cfg).settings)) == cfg


def test_fault_of_stored_settings_names_their_file(tmp_path: Path) -> None:
    _started(cfg := _config(tmp_path))
    with pytest.raises(ConfigError) as raised:
        _cluster(tmp_path, "--job=prod", "--train.stepz=7")
    assert "unknown key 'train.stepz'" in raised.value.message and "stored" not in str(raised.value)
    stored = cluster_settings.stored(ClusterPaths.of(cfg).settings)
    path = ClusterPaths.of(cfg).settings
    cluster_settings.restore(path, yaml.safe_dump({**stored, "algorithm": {"kl_kind": "k3"}}).encode())
    with pytest.raises(ConfigError, match="unknown key 'algorithm.kl_kind'") as raised:
        _cluster(tmp_path, "--job=prod")
    assert str(path) in raised.value.message


def test_commands_overlay_the_settings_of_a_known_cluster(tmp_path: Path) -> None:
    _started(_config(tmp_path, train={"steps": 7, "lr": 0.5}, etcd={"endpoints": EXTERNAL}))
    cfg = _cluster(tmp_path, "--job=prod").cfg
    assert (cfg.etcd.endpoints, cfg.train.steps, cfg.train.lr) == (EXTERNAL, 7, 0.5)
    file = tmp_path / "more.yaml"
    file.write_text(yaml.safe_dump({"job": "prod", "train": {"steps": 8}, "etcd": {"call_timeout_s": 3}}))
    cfg = _cluster(tmp_path, "--train.lr=0.25", file=file).cfg
    assert (cfg.etcd.endpoints, cfg.etcd.call_timeout_s, cfg.train.steps, cfg.train.lr) == (EXTERNAL, 3, 8, 0.25)
    assert _cluster(tmp_path).cfg.train.steps == 7, "the only cluster, without its name"
    Cluster(_config(tmp_path)).down()
    assert _cluster(tmp_path, "--job=prod").cfg.train.steps == 7, "they hold for what is kept"
    Cluster(_config(tmp_path)).down(purge=True)
    assert _cluster(tmp_path, "--job=prod").cfg.train.steps != 7, "nothing is kept"


def test_mappings_of_a_file_take_the_place_of_those_that_are_known(tmp_path: Path) -> None:
    pools = {"judge": {"model": "/judge", "engines": 2}, "other": {"model": "/other"}}
    _started(_config(tmp_path, pools=pools, rollout={"reward": "mix", "reward_options": {"parts": [], "a": 1}}))
    assert set(_cluster(tmp_path, "--job=prod").cfg.pools) == {"judge", "other"}
    cfg = _cluster(tmp_path, "--job=prod", "--pools.judge.engines=3", "--rollout.reward_options.a=2").cfg
    assert set(cfg.pools) == {"judge", "other"} and cfg.pools["judge"].engines == 3, "of the command line: one of them"
    assert cfg.rollout.reward_options == {"parts": [], "a": 2}
    file = tmp_path / "more.yaml"
    file.write_text(yaml.safe_dump({"job": "prod", "pools": {"judge": {"model": "/judge"}},
                                    "rollout": {"reward": "f1", "reward_options": {}}}))
    cfg = _cluster(tmp_path, file=file).cfg
    assert set(cfg.pools) == {"judge"} and cfg.pools["judge"].engines == 1 and not cfg.rollout.reward_options


def test_down_works_with_damaged_files(tmp_path: Path) -> None:
    cfg = _config(tmp_path)
    chunk = _started(cfg)
    ClusterPaths.of(cfg).info.write_text("{")
    ClusterPaths.of(cfg).settings.write_bytes(b"\xff: [")
    ClusterPaths.of(cfg).services.mkdir()
    (ClusterPaths.of(cfg).services / "etcd-0.json").touch()
    stray = processes.spawn(["sleep", "600"], log=tmp_path / "log", env={OWNER_ENV: str(JobPaths.of(cfg).private)})
    assert Cluster(cfg).down() == [f"stray {stray.pid}"]
    assert chunk.exists()
    assert not list(ClusterPaths.of(cfg).services.iterdir()) and not ClusterPaths.of(cfg).info.exists()


def test_up_refuses_another_etcd(tmp_path: Path) -> None:
    _started(_config(tmp_path, etcd={"endpoints": EXTERNAL}))
    with pytest.raises(ConfigError, match=r"etcd\.endpoints is empty.*10\.0\.0\.1:2379") as e:
        Cluster(_config(tmp_path)).up()
    assert "elastic-rl down" in e.value.hint
    Cluster(_config(tmp_path)).down()
    with pytest.raises(ConfigError, match=r"disk/node-0 belongs to that one") as e:
        Cluster(_config(tmp_path)).up()
    assert "--etcd.endpoints=[10.0.0.1:2379]" in e.value.hint


@pytest.mark.parametrize("theirs", ["link", "of another user"])
def test_folder_that_others_may_have_put_there_is_refused(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str) -> None:
    cfg = _config(tmp_path)
    chunk = _started(cfg)
    if theirs == "link":
        JobPaths.of(cfg).private.rename(tmp_path / "theirs")
        JobPaths.of(cfg).private.symlink_to(tmp_path / "theirs")
    else:
        monkeypatch.setattr("os.getuid", lambda: 12345)
    cluster = Cluster(cfg)
    for refused in (cluster.down, partial(cluster.down, purge=True), cluster.connect, cluster.up,
                    partial(cluster_settings.stored, ClusterPaths.of(cfg).settings)):
        with pytest.raises(PreflightFailed, match="is not a folder of this user") as e:
            refused()
        assert "run_dir" in e.value.hint
    assert chunk.exists() and ClusterPaths.of(cfg).info.exists()


def test_no_group_may_write_to_the_folders_around_the_cluster(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        cluster = Cluster(_config(tmp_path / "runs"))
        cluster._make_folder(cluster.dir)
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("runs", "runs/prod", "runs/prod/cluster")]
    assert modes == [0o755, 0o755, 0o700]


def test_up_starts_nothing_beside_services_without_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.host.local_cluster._EXIT_GRACE_S", 0.2)
    cfg = _config(tmp_path)
    _started(cfg)
    stray = processes.spawn(["sleep", "600"], log=tmp_path / "log", env={OWNER_ENV: str(JobPaths.of(cfg).private)})
    with pytest.raises(PreflightFailed, match=rf"processes {stray.pid} of this cluster run without a record") as e:
        Cluster(cfg).up()
    assert "elastic-rl down" in e.value.hint
    assert (ClusterPaths.of(cfg).etcd / "member").is_dir(), "the data that it may use"
    assert Cluster(cfg).down() == [f"stray {stray.pid}"]


@pytest.mark.parametrize(("settings", "names"), [
    ({"coordinator": {"host": "no.such.host.invalid"}}, "coordinator.host"),
    ({"coordinator": {"host": "198.51.100.1"}}, "coordinator.host"),
    ({"dcs": {"host": "no.such.host.invalid"}}, "dcs.host"), ({"dcs": {"host": "a" * 64}}, "dcs.host")])
def test_up_checks_addresses_before_it_starts_anything(tmp_path: Path, settings: dict, names: str) -> None:
    cluster = Cluster(_config(tmp_path, **settings))
    with pytest.raises(PreflightFailed, match=re.escape(names)):
        cluster.up()
    assert not (cluster.dir / "etcd").exists() and not cluster.services.all()


def test_up_into_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="run_dir|cannot create"):
        Cluster(_config(tmp_path / "file")).up()


@pytest.mark.parametrize("known", [False, True])
def test_refused_up_leaves_the_stored_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """Services that are started again, and the next `up`, would have settings that were never in use."""
    cluster = Cluster(_config(tmp_path, seed=1))
    cluster.dir.mkdir(parents=True)
    if known:
        cluster_settings.save(_config(tmp_path, seed=2), cluster.paths.settings)
    before = cluster_settings.snapshot(cluster.paths.settings)
    agents: list[int] = []

    def start_agent(name: str) -> None:
        agents.append(cluster_settings.stored(cluster.paths.settings)["seed"])

    monkeypatch.setattr(cluster, "_start_agent", start_agent)
    monkeypatch.setattr(etcd_server, "find_binary", _no_etcd)
    with pytest.raises(PreflightFailed, match="no etcd"):
        cluster.up()
    assert agents == [1], "it had come as far as the agent, which reads them"
    assert cluster_settings.snapshot(cluster.paths.settings) == before


def test_up_beside_services_whose_secret_is_gone_leaves_the_stored_settings(tmp_path: Path) -> None:
    cluster = Cluster(_config(tmp_path, seed=1))
    cluster.dir.mkdir(parents=True)
    cluster_settings.save(_config(tmp_path, seed=2), cluster.paths.settings)
    file = cluster.paths.settings.stat().st_ino
    pid = cluster.services.start("coordinator-0", ["sleep", "600"], log=tmp_path / "log")
    try:
        with pytest.raises(PreflightFailed, match="secret is gone"):
            cluster.up()
        assert cluster.paths.settings.stat().st_ino == file, "not even for a moment"
    finally:
        processes.stop(pid)


def _no_etcd() -> Path:
    raise PreflightFailed("no etcd")


def test_settings_that_nothing_has_changed_are_not_replaced(tmp_path: Path) -> None:
    """A host agent reads them again when their file is another one."""
    cluster_settings.save(_config(tmp_path), path := tmp_path / "settings.yaml")
    first = path.stat().st_ino
    kept = path.open()  # so that no other file gets the number
    cluster_settings.restore(path, cluster_settings.snapshot(path))
    assert path.stat().st_ino == first
    cluster_settings.save(_config(tmp_path, seed=1), path)
    assert path.stat().st_ino != first
    kept.close()
