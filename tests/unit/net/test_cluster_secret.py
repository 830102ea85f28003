"""The secret of a cluster and what is derived from it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.errors import ConfigError
from elastic_rl.net.cluster_secret import ClusterSecret

SECRET = ClusterSecret("0" * 64)
jobs = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True)


def test_tokens_are_the_hmac_of_their_purpose() -> None:
    """Known values: a release that derives others could not join a cluster, and `down` keeps the secret."""
    assert SECRET.dcs("j") == "d5cb64170562f9bbf1651714cf0b457f5789d219f3343077c0573c177f0d2ae2"
    assert SECRET.ray("j", 7) == "00a57f778eaf7f9692690eb0b3bcf6a9267623cada076f1f131ec7bc26ad722c"
    assert SECRET.api("operator") == "ee9692cf3f3a643828dee7bbd83aeedb49597fdbe731f77ffe057e33e0fe6f33"


@given(jobs, jobs, st.integers(0, 1 << 62), st.integers(0, 1 << 62))
def test_no_two_purposes_have_the_same_token(one: str, other: str, epoch: int, later: int) -> None:
    found = {SECRET.api("operator"), SECRET.api("viewer")}
    purposes = {(kind, job) for kind in ("dcs", "engine") for job in (one, other)} | {
        ("ray", job, number) for job in (one, other) for number in (epoch, later)}
    for kind, *what in purposes:
        found.add(getattr(SECRET, kind)(*what))
    assert len(found) == len(purposes) + 2 and all(len(token) == 64 for token in found)


def test_another_secret_gives_other_tokens_and_is_not_shown() -> None:
    assert ClusterSecret("1" * 64).dcs("j") != SECRET.dcs("j") and "0" * 64 not in repr(SECRET)


def test_saved_secret_is_for_its_owner_alone(tmp_path: Path) -> None:
    path, made = tmp_path / "secret", ClusterSecret.generate()
    made.save(path)
    assert len(made.value) == 64 and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ClusterSecret.read(path) == made != ClusterSecret.generate()


@pytest.mark.parametrize("content", [b"", b"  \n", b"two\nlines" * 9, "schl\u00fcssel".encode() * 9, b"\xff\xfe",
                                     b"0" * 31, b"0" * 257, b"0" * 10000])
def test_damaged_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"the secret of the cluster, {path}") as refused:
        ClusterSecret.read(path)
    assert "elastic-rl up" in refused.value.hint


def test_missing_secret_names_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read.*No such file") as refused:
        ClusterSecret.read(tmp_path / "secret")
    assert "elastic-rl up" in refused.value.hint


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_secret_that_others_may_know_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    SECRET.save(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"has the mode {mode:o}") as refused:
        ClusterSecret.read(path)
    assert "`elastic-rl down`, remove the file" in refused.value.hint


def test_secret_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    SECRET.save(path)
    monkeypatch.setattr(os, "geteuid", lambda own=os.geteuid(): own + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        ClusterSecret.read(path)
