"""The token table of the admin API, and the files that ``up`` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_rl.coordinator.api import auth
from elastic_rl.coordinator.api.auth import Role, TokenTable
from elastic_rl.errors import ConfigError


def write(path: Path, table: object, mode: int = 0o600) -> Path:
    path.write_text(json.dumps(table))
    path.chmod(mode)
    return path


def test_token_is_found_by_its_digest_and_withdrawn_without_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    entry = {"name": "ada", "role": "operator", "sha256": auth.digest("s3cret")}
    table = TokenTable(write(path, {"tokens": [entry]}))
    found = table.find("s3cret")
    assert found is not None and found.name == "ada" and found.role.may(Role.VIEWER)
    assert table.find("S3cret") is None and table.find("") is None
    write(path, {"tokens": []})
    assert table.find("s3cret") is None


def test_short_form_of_the_table_names_a_token_by_its_role(tmp_path: Path) -> None:
    table = TokenTable(write(tmp_path / "t", {"viewer": "v" * 16, "operator": "o" * 16}))
    viewer = table.find("v" * 16)
    assert viewer is not None and viewer.role is Role.VIEWER and not viewer.role.may(Role.OPERATOR)


@pytest.mark.parametrize(("table", "mode", "says"), [
    ({"tokens": []}, 0o644, "read by others"), ({"tokens": [{"name": "x"}]}, 0o600, "cannot be read"),
    ("nonsense", 0o600, "cannot be read"), ({"root": "x"}, 0o600, "cannot be read")])
def test_bad_token_table_is_refused(tmp_path: Path, table: object, mode: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TokenTable(write(tmp_path / "t", table, mode))


@pytest.mark.parametrize("token", ["", None, "short", 1234567890123456, ["a" * 16], "x" * 15, " " * 16])
def test_weak_token_in_the_short_form_is_refused(tmp_path: Path, token: object) -> None:
    with pytest.raises(ConfigError, match="'operator'.*16 characters"):
        TokenTable(write(tmp_path / "t", {"viewer": "v" * 16, "operator": token}))


def test_digest_of_the_empty_token_is_refused(tmp_path: Path) -> None:
    entry = {"name": "ada", "role": "operator", "sha256": auth.digest("")}
    with pytest.raises(ConfigError, match="'ada'"):
        TokenTable(write(tmp_path / "t", {"tokens": [entry]}))


def test_table_behind_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t", {"tokens": []})
    table = TokenTable(path)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        table.find("x")


def test_missing_token_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing") as refused:
        TokenTable(tmp_path / "none")
    assert "elastic-rl up" in refused.value.hint


def test_written_table_holds_digests_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    path, tokens = tmp_path / "table", {role.value: auth.new_token() for role in Role}
    auth.write_table(path, tokens)
    for role in Role:
        found = TokenTable(path).find(tokens[role])
        assert found is not None and found.role is role
    assert path.stat().st_mode & 0o777 == 0o600
    assert not set(tokens.values()) & set(path.read_text().split('"'))
