"""The secret of a cluster, the tokens of its API that are made from it, and what of both ``down`` keeps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

import pytest

from elastic_rl.config import Config, parse
from elastic_rl.coordinator.api.auth import Role, TokenTable, digest, write_table
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ConfigError, PreflightFailed
from elastic_rl.host import job_secrets, kept_state
from elastic_rl.host.job_secrets import dcs_security, engine_key_file, ray_token_file
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
    cluster._secrets(set())
    files = _files(cluster.cfg)
    before = [path.read_text() for path in files]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == set(files)
    cluster._secrets(set())  # services that run know the first ones
    assert [path.read_text() for path in files] == before


def test_every_token_comes_from_the_secret(tmp_path: Path) -> None:
    cluster = _cluster(tmp_path)
    cluster._secrets(set())
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
    cluster._secrets(set())
    secret, *others = _files(cluster.cfg)
    before = [path.read_text() for path in others]
    for path in others:
        path.unlink()
        cluster._secrets(set())
        assert [p.read_text() for p in others] == before and path.stat().st_mode & 0o777 == 0o600
    assert not said


def test_table_of_the_users_is_never_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    cluster = _cluster(tmp_path, said)
    write_table(cluster.paths.tokens, {Role.OPERATOR: "a token of the users"})
    table = cluster.paths.tokens.read_bytes()
    cluster._secrets(set())
    assert cluster.paths.tokens.read_bytes() == table and "tokens.json does not list" in said[0]
    assert TokenTable(cluster.paths.tokens).find("a token of the users")


@pytest.mark.parametrize("killed_in", ["", "elastic_rl.coordinator.api.auth.replace_tokens",
                                       "elastic_rl.host.cluster_secrets._write_credentials",
                                       "elastic_rl.net.cluster_secret.ClusterSecret.save"])
def test_new_secret_withdraws_the_tokens_of_the_old_one_and_no_others(
        tmp_path: Path, killed_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    said: list[str] = []
    cluster = _cluster(tmp_path, said)
    cluster._secrets(set())
    paths = cluster.paths
    old = ClusterSecret.read(paths.secret)
    table = json.loads(paths.tokens.read_text())
    table["tokens"].append({"name": "eve", "role": "viewer", "sha256": digest("a token of the users")})
    paths.tokens.write_text(json.dumps(table))
    paths.secret.unlink()
    if killed_in:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(killed_in, kill)
            cluster._secrets(set())
        assert not paths.secret.exists(), "the next start would keep what the killed one did not replace"
    cluster._secrets(set())
    new = ClusterSecret.read(paths.secret)
    tokens = TokenTable(paths.tokens)
    assert new != old and json.loads(paths.credentials.read_text()) == {role.value: new.api(role) for role in Role}
    assert paths.viewer_token.read_text() == new.api(Role.VIEWER)
    assert not any(tokens.find(old.api(role)) for role in Role), "who knows the old secret is still admitted"
    assert {tokens.find(new.api(role)).role for role in Role} == set(Role)  # type: ignore[union-attr]
    assert tokens.find("a token of the users") and (killed_in or len(tokens.entries()) == 3)
    assert all(text.endswith("are withdrawn and replaced") for text in said) and said


def test_running_services_keep_a_cluster_from_getting_a_second_secret(tmp_path: Path) -> None:
    cluster = _cluster(tmp_path)
    cluster._secrets(set())
    cluster.paths.secret.unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(PreflightFailed, match=r"secret is gone") as refused:
        cluster._secrets({"coordinator-0"})
    where = kept_state.cluster_options(cluster.cfg)
    assert refused.value.hint == f"`elastic-rl down {where}`, then `elastic-rl up {where}`"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_processes_that_write_a_file_at_once_do_not_disturb_each_other(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = _cluster(tmp_path)
    cluster._secrets(set())
    path = JobPaths.of(cluster.cfg).engine_key
    path.unlink()
    replace_file = job_secrets.replace_file

    def slowly(target: Path, content: str, **options: Any) -> None:
        def write(file: IO[bytes]) -> None:
            monkeypatch.setattr(job_secrets, "replace_file", replace_file)
            monkeypatch.setattr(os, "getpid", lambda own=os.getpid(): own + 1)
            engine_key_file(cluster.cfg)  # another process begins and ends meanwhile
            file.write(content.encode())

        replace_file(target, write, **options)

    monkeypatch.setattr(job_secrets, "replace_file", slowly)
    engine_key_file(cluster.cfg)
    assert read_key(path) == job_secrets.engine_key(cluster.cfg) and not list(path.parent.glob("*.partial"))


def test_key_file_with_another_key_or_open_to_others_is_replaced(tmp_path: Path) -> None:
    cluster = _cluster(tmp_path)
    cluster._secrets(set())
    path = JobPaths.of(cluster.cfg).engine_key
    key = read_key(path)
    path.write_text("0" * 64)
    cluster._secrets(set())
    assert read_key(path) == key
    path.chmod(0o644)
    cluster._secrets(set())
    assert read_key(path) == key


def test_token_of_ray_is_in_a_file_of_its_epoch(tmp_path: Path) -> None:
    """An older driver that starts Ray again, and all that start with the path of its file, do not have the newer
    driver's token."""
    cluster = _cluster(tmp_path)
    cluster._secrets(set())
    old = ray_token_file(cluster.cfg, 9)
    first = old.read_text()
    new = ray_token_file(cluster.cfg, 10)
    token = new.read_text()
    assert not old.exists() and token != first and new.stat().st_mode & 0o777 == 0o600
    assert ray_token_file(cluster.cfg, 9) == old and old.read_text() == first and new.read_text() == token
    new.with_name(f"{new.name}.1234.partial").touch()
    cluster.down()
    assert not list(new.parent.glob("ray-*"))


def test_damaged_secret_stops_the_start_and_is_kept(tmp_path: Path) -> None:
    cluster = _cluster(tmp_path)
    cluster.paths.secret.write_text("short")
    cluster.paths.secret.chmod(0o600)
    with pytest.raises(ConfigError, match="the secret of the cluster"):
        cluster._secrets(set())
    assert cluster.paths.secret.read_text() == "short" and not cluster.paths.tokens.exists()


def test_processes_of_a_cluster_that_is_up_require_the_secret(tmp_path: Path) -> None:
    cfg = _cluster(tmp_path).cfg
    assert dcs_security(cfg).token == "", "the nodes may be another machine's, without a token"
    with pytest.raises(ConfigError, match="the secret of the cluster") as refused:
        dcs_security(cfg, required=True)
    assert "elastic-rl up" in refused.value.hint
    ClusterInfo("j", [], [], "").save(ClusterPaths.of(cfg).info)
    with pytest.raises(ConfigError, match="the secret of the cluster"):
        dcs_security(cfg)


def test_token_that_the_settings_name_counts_instead(tmp_path: Path) -> None:
    (tmp_path / "named").write_text("named")
    cluster = _cluster(tmp_path, dcs={"token_file": str(tmp_path / "named")})
    assert dcs_security(cluster.cfg, required=True).token == "named", "no secret is needed"
    cluster._secrets(set())
    assert dcs_security(cluster.cfg).token == "named"


def test_down_keeps_the_secret_and_purge_deletes_it(tmp_path: Path) -> None:
    cluster = _cluster(tmp_path)
    cluster._secrets(set())
    secret = cluster.paths.secret.read_text()
    cluster.down()
    assert cluster.paths.secret.read_text() == secret
    assert not JobPaths.of(cluster.cfg).engine_key.exists(), "it is made again from the secret"
    cluster.down(purge=True)
    assert not any(path.exists() for path in _files(cluster.cfg)) and not kept_state.folders(cluster.cfg)
