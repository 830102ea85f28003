"""The secret of a cluster, the tokens of its API that are made from it, and what of both ``down`` keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_rl.config import Config, parse
from elastic_rl.coordinator.api.auth import Role, TokenTable, write_table
from elastic_rl.errors import ConfigError
from elastic_rl.host import kept_state
from elastic_rl.host.job_secrets import dcs_security, ray_token_file
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.net.engine_key import read_key


def _cluster(tmp_path: Path, said: list[str] | None = None, **settings: object) -> Cluster:
    cluster = Cluster(parse({"job": "j", "run_dir": str(tmp_path), **settings}),
                      say=said.append if said is not None else print)
    cluster.dir.mkdir(parents=True, exist_ok=True)
    return cluster


def _files(cfg: Config) -> list[Path]:
    cluster = ClusterPaths.of(cfg)
    return [cluster.secret, cluster.credentials, cluster.viewer_token, cluster.tokens, JobPaths.of(cfg).engine_key]


def test_secrets_are_made_once_and_are_for_their_owner_alone(tmp_path: Path) -> None:
    cluster = _cluster(tmp_path)
    cluster._secrets()
    files = _files(cluster.cfg)
    before = [path.read_text() for path in files]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == set(files)
    cluster._secrets()  # services that run know the first ones
    assert [path.read_text() for path in files] == before


def test_every_token_comes_from_the_secret(tmp_path: Path) -> None:
    cluster = _cluster(tmp_path)
    cluster._secrets()
    paths, secret = cluster.paths, ClusterSecret.read(cluster.paths.secret)
    assert json.loads(paths.credentials.read_text()) == {role.value: secret.api(role) for role in Role}
    assert paths.viewer_token.read_text() == secret.api(Role.VIEWER)
    assert read_key(JobPaths.of(cluster.cfg).engine_key) == secret.engine("j")
    assert dcs_security(cluster.cfg).token == dcs_security(cluster.cfg, required=True).token == secret.dcs("j")
    for role in Role:
        entry = TokenTable(paths.tokens).find(secret.api(role))
        assert entry is not None and entry.role is role


def test_missing_files_with_tokens_are_made_again(tmp_path: Path) -> None:
    said: list[str] = []
    cluster = _cluster(tmp_path, said)
    cluster._secrets()
    secret, *others = _files(cluster.cfg)
    before = [path.read_text() for path in others]
    for path in others:
        path.unlink()
        cluster._secrets()
        assert [p.read_text() for p in others] == before and path.stat().st_mode & 0o777 == 0o600
    assert not said


def test_table_of_the_users_is_never_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    cluster = _cluster(tmp_path, said)
    write_table(cluster.paths.tokens, {Role.OPERATOR: "a token of the users"})
    table = cluster.paths.tokens.read_bytes()
    cluster._secrets()
    assert cluster.paths.tokens.read_bytes() == table and "tokens.json does not list" in said[0]
    assert TokenTable(cluster.paths.tokens).find("a token of the users")


def test_key_file_with_another_key_or_open_to_others_is_replaced(tmp_path: Path) -> None:
    cluster = _cluster(tmp_path)
    cluster._secrets()
    path = JobPaths.of(cluster.cfg).engine_key
    key = read_key(path)
    path.write_text("0" * 64)
    cluster._secrets()
    assert read_key(path) == key
    path.chmod(0o644)
    cluster._secrets()
    assert read_key(path) == key


def test_token_of_ray_is_another_one_in_each_epoch(tmp_path: Path) -> None:
    cluster = _cluster(tmp_path)
    cluster._secrets()
    first = ray_token_file(cluster.cfg, 1).read_text()
    path = ray_token_file(cluster.cfg, 2)
    assert path.read_text() != first and path.stat().st_mode & 0o777 == 0o600
    assert ray_token_file(cluster.cfg, 1).read_text() == first


def test_damaged_secret_stops_the_start_and_is_kept(tmp_path: Path) -> None:
    cluster = _cluster(tmp_path)
    cluster.paths.secret.write_text("short")
    cluster.paths.secret.chmod(0o600)
    with pytest.raises(ConfigError, match="the secret of the cluster"):
        cluster._secrets()
    assert cluster.paths.secret.read_text() == "short" and not cluster.paths.tokens.exists()


def test_server_of_a_cluster_requires_the_secret_and_its_clients_do_not(tmp_path: Path) -> None:
    cfg = parse({"job": "j", "run_dir": str(tmp_path)})
    assert dcs_security(cfg).token == "", "the nodes may be another machine's, without a token"
    with pytest.raises(ConfigError, match="the secret of the cluster") as refused:
        dcs_security(cfg, required=True)
    assert "elastic-rl up" in refused.value.hint


def test_token_that_the_settings_name_counts_instead(tmp_path: Path) -> None:
    (tmp_path / "named").write_text("named")
    cluster = _cluster(tmp_path, dcs={"token_file": str(tmp_path / "named")})
    assert dcs_security(cluster.cfg, required=True).token == "named", "no secret is needed"
    cluster._secrets()
    assert dcs_security(cluster.cfg).token == "named"


def test_down_keeps_the_secret_and_purge_deletes_it(tmp_path: Path) -> None:
    cluster = _cluster(tmp_path)
    cluster._secrets()
    secret = cluster.paths.secret.read_text()
    cluster.down()
    assert cluster.paths.secret.read_text() == secret
    assert not JobPaths.of(cluster.cfg).engine_key.exists(), "it is made again from the secret"
    cluster.down(purge=True)
    assert not any(path.exists() for path in _files(cluster.cfg)) and not kept_state.folders(cluster.cfg)
