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
from elastic_rl.coordinator.api import auth
from elastic_rl.coordinator.api.auth import TokenTable
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.coordinator.client.credentials import read_token
from elastic_rl.errors import ConfigError, PreflightFailed
from elastic_rl.host import cluster_settings, processes
from elastic_rl.host.local_cluster import OWNER_ENV, Cluster

EXTERNAL = ["10.0.0.1:2379"]


def _config(tmp_path: Path, **more: object) -> Config:
    return parse({"job": "prod", "run_dir": str(tmp_path), **more})


def _started(cfg: Config) -> Path:
    """What `up` leaves in the folder, without its processes. Returns the chunk on the node's disk."""
    chunk = cfg.cluster_dir / "disk" / "node-0" / "ab" / "chunk"
    chunk.parent.mkdir(parents=True)
    chunk.touch()
    (cfg.cluster_dir / "etcd" / "member").mkdir(parents=True)
    cluster_settings.save(cfg, cfg.cluster_dir)
    ClusterInfo(cfg.job, cfg.etcd.endpoints or ["127.0.0.1:1"], [], "", str(cfg.cluster_dir),
                own_etcd=not cfg.etcd.endpoints).save()
    return chunk


def _cluster(tmp_path: Path, *args: str, file: Path | None = None) -> Cluster:
    """The cluster that a command line addresses."""
    context = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))
    context.args = [f"--run_dir={tmp_path}", *args]
    return common.find_cluster(context, file)


def test_settings_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    cfg = _config(tmp_path, alerts={"urls": ["json://user:secret@host"]})
    cfg.cluster_dir.mkdir(parents=True)
    path = cluster_settings.save(cfg, cfg.cluster_dir)
    assert path.stat().st_mode & 0o777 == 0o600
    assert "secret" in path.read_text(), "the services read it"
    assert parse(cluster_settings.stored(cfg.cluster_dir)) == cfg


def test_fault_of_stored_settings_names_their_file(tmp_path: Path) -> None:
    _started(cfg := _config(tmp_path))
    with pytest.raises(ConfigError) as raised:
        _cluster(tmp_path, "--job=prod", "--train.stepz=7")
    assert "unknown key 'train.stepz'" in raised.value.message and "stored" not in str(raised.value)
    stored = cluster_settings.stored(cfg.cluster_dir)
    path = cluster_settings.restore({**stored, "algorithm": {"kl_kind": "k3"}}, cfg.cluster_dir)
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
    (cfg.cluster_dir / "cluster.json").write_text("{")
    (cfg.cluster_dir / "config.yaml").write_bytes(b"\xff: [")
    (cfg.cluster_dir / "services").mkdir()
    (cfg.cluster_dir / "services" / "etcd-0.json").touch()
    stray = processes.spawn(["sleep", "600"], log=tmp_path / "log", env={OWNER_ENV: str(cfg.cluster_dir)})
    assert Cluster(cfg).down() == [f"stray {stray.pid}"]
    assert chunk.exists()
    assert not list((cfg.cluster_dir / "services").iterdir()) and not (cfg.cluster_dir / "cluster.json").exists()


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
        cfg.cluster_dir.rename(tmp_path / "theirs")
        cfg.cluster_dir.symlink_to(tmp_path / "theirs")
    else:
        monkeypatch.setattr("os.getuid", lambda: 12345)
    cluster = Cluster(cfg)
    for refused in (cluster.down, partial(cluster.down, purge=True), cluster.connect, cluster.up,
                    partial(cluster_settings.stored, cfg.cluster_dir)):
        with pytest.raises(PreflightFailed, match="is not a folder of this user") as e:
            refused()
        assert "run_dir" in e.value.hint
    assert chunk.exists() and (cfg.cluster_dir / "cluster.json").exists()


def test_no_group_may_write_to_the_folders_around_the_cluster(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        Cluster(_config(tmp_path / "runs"))._make_folder()
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("runs", "runs/prod", "runs/prod/cluster")]
    assert modes == [0o755, 0o755, 0o700]


def test_up_starts_nothing_beside_services_without_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.host.local_cluster._EXIT_GRACE_S", 0.2)
    cfg = _config(tmp_path)
    _started(cfg)
    stray = processes.spawn(["sleep", "600"], log=tmp_path / "log", env={OWNER_ENV: str(cfg.cluster_dir)})
    with pytest.raises(PreflightFailed, match=rf"processes {stray.pid} of this cluster run without a record") as e:
        Cluster(cfg).up()
    assert "elastic-rl down" in e.value.hint
    assert (cfg.cluster_dir / "etcd" / "member").is_dir(), "the data that it may use"
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


# -- tokens -----------------------------------------------------------------------------------------------------------
FILES = (auth.TABLE, auth.CREDENTIALS, auth.VIEWER_TOKEN)


def test_missing_files_of_tokens_are_made_from_the_others(tmp_path: Path) -> None:
    cluster = Cluster(_config(tmp_path))
    cluster.dir.mkdir(parents=True)
    assert cluster._tokens() == cluster.dir / auth.CREDENTIALS
    before = {name: (cluster.dir / name).read_text() for name in FILES}
    for name in (auth.TABLE, auth.VIEWER_TOKEN):
        (cluster.dir / name).unlink()
        cluster._tokens()
        assert {n: (cluster.dir / n).read_text() for n in FILES} == before
        assert (cluster.dir / name).stat().st_mode & 0o777 == 0o600


def test_table_is_never_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    cluster = Cluster(_config(tmp_path), say=said.append)
    cluster.dir.mkdir(parents=True)
    token, table = read_token(cluster._tokens(), "operator"), (cluster.dir / auth.TABLE).read_bytes()
    (cluster.dir / auth.CREDENTIALS).unlink()
    cluster._tokens()
    assert (cluster.dir / auth.TABLE).read_bytes() == table
    assert not (cluster.dir / auth.CREDENTIALS).exists() and "credentials.json is missing" in said[0]
    entry = TokenTable(cluster.dir / auth.TABLE).find(token)
    assert entry is not None and entry.role == "operator"
