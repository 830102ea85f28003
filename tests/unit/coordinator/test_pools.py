"""Pools: accepted values, ETags and tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.config import CoordinatorConfig
from elastic_rl.coordinator import pools
from elastic_rl.coordinator.api import auth
from elastic_rl.coordinator.api.auth import Role, TokenTable
from elastic_rl.coordinator.problems import Problem
from elastic_rl.errors import ConfigError


@given(st.integers())
def test_desired_number_out_of_range_is_refused(desired: int) -> None:
    if 1 <= desired <= 64:
        assert pools.check_desired(desired, 64) == desired
    else:
        with pytest.raises(Problem) as e:
            pools.check_desired(desired, 64)
        assert e.value.status == 422 and "between 1 and 64" in e.value.detail


@pytest.mark.parametrize(("header", "revision"), [('"12"', 12), ("12", 12), ('W/"12"', 12), ("*", None)])
def test_etag_is_the_revision_of_the_spec(header: str, revision: int | None) -> None:
    assert pools.parse_if_match(header) == revision
    assert revision is None or pools.parse_if_match(pools.etag(revision)) == revision


@pytest.mark.parametrize(("header", "status"), [(None, 428), (" ", 428), ('"abc"', 412), ('"-3"', 412)])
def test_missing_if_match_is_428_and_foreign_etag_412(header: str | None, status: int) -> None:
    with pytest.raises(Problem) as e:
        pools.parse_if_match(header)
    assert e.value.status == status


def write(path: Path, table: object, mode: int = 0o600) -> Path:
    path.write_text(json.dumps(table))
    path.chmod(mode)
    return path


def test_a_token_is_found_by_its_digest_and_withdrawn_without_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    entry = {"name": "ada", "role": "operator", "sha256": auth.digest("s3cret")}
    table = TokenTable(write(path, {"tokens": [entry]}), must_exist=True)
    found = table.find("s3cret")
    assert found is not None and found.name == "ada" and found.role.may(Role.VIEWER)
    assert table.find("S3cret") is None and table.find("") is None
    write(path, {"tokens": []})
    assert table.find("s3cret") is None


def test_the_short_form_names_a_token_by_its_role(tmp_path: Path) -> None:
    table = TokenTable(write(tmp_path / "t", {"viewer": "v", "operator": "o"}), must_exist=True)
    viewer = table.find("v")
    assert viewer is not None and viewer.role is Role.VIEWER and not viewer.role.may(Role.OPERATOR)


@pytest.mark.parametrize(("table", "mode", "says"), [
    ({"tokens": []}, 0o644, "read by others"), ({"tokens": [{"name": "x"}]}, 0o600, "cannot be read"),
    ("nonsense", 0o600, "cannot be read"), ({"root": "x"}, 0o600, "cannot be read")])
def test_a_bad_token_table_is_refused(tmp_path: Path, table: object, mode: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TokenTable(write(tmp_path / "t", table, mode), must_exist=True)


def test_a_missing_table_is_an_error_only_where_tokens_are_required(tmp_path: Path) -> None:
    assert TokenTable(tmp_path / "none", must_exist=False).find("x") is None
    with pytest.raises(ConfigError, match="missing"):
        TokenTable(tmp_path / "none", must_exist=True)


@pytest.mark.parametrize(("host", "setting", "required"), [
    ("127.0.0.1", None, False), ("localhost", None, False), ("::1", None, False), ("0.0.0.0", None, True),
    ("10.0.0.1", None, True), ("host.example", None, True), ("127.0.0.1", True, True), ("0.0.0.0", False, False)])
def test_tokens_are_off_only_on_loopback(host: str, setting: bool | None, required: bool) -> None:
    assert auth.tokens_required(CoordinatorConfig(host=host, require_token=setting)) is required
